"""Messages that detokenize receives."""

from msgspec import Raw

from pipeline.runtime.messages.common import DraftCounts, Failure, Finish, FirstTimes, Message, Ping, Start, Stop
from pipeline.runtime.messages.gateway import PrefixCacheReset
from pipeline.runtime.messages.restarts import PeerRestarted
from pipeline.shm.arrays import Array


class Open(Message, frozen=True, tag="open"):
    """From schedule: a sequence begins. Closed by the `Settled` entry with its finish."""

    seq: int
    request_id: int
    attempt: int
    index: int
    gateway: int
    prompt_tail: bytes
    """int32; the prompt's last ids: a first output token may continue a character or a word of it"""
    options: Raw
    """`GenerationOptions`"""
    outputs: Array = b""
    """int32; output ids that the client has already"""
    finish: int = Finish.NONE
    """How these ids end the sequence, if they do; a `Settled` without further ids follows."""
    token_output_bytes: int = 0
    """Bytes of the token output of each output id; 0: no token outputs."""


class Settled(Message, frozen=True, tag="settled"):
    """From schedule: ids that are final; parallel arrays. A sequence that was preempted and resumed may have two
    entries, in the order of its ids."""

    seqs: Array
    """uint64"""
    starts: Array
    """int32; output ids of the sequence before these"""
    counts: Array
    """int32"""
    ids: Array
    """int32; of all entries, one after the other"""
    finishes: Array
    """uint8, `Finish`. STOP means that the last id is the one that stopped it."""
    firsts: list[FirstTimes] = []
    """Of the entries with the first sampled id of their sequence."""
    settled_s: float = 0.0
    """When this was sent, by time.monotonic()."""
    token_outputs: Array = b""
    """uint8: those of `ids`, of the entries that ask for them, one after the other"""
    prompt_seqs: list[int] = []
    """Sequences with logprobs of their prompt in this message; the next two are parallel. None of them has ended
    before."""
    prompt_starts: list[int] = []
    """Logprobs of the prompt before these"""
    prompt_logprobs: list[bytes] = []
    errors: list[str] = []
    """The reason of each entry whose finish is `ERROR`, in order; empty if none is known."""
    drafts: list[DraftCounts] = []
    """Of the entries whose request has a predicted output, if ids were proposed."""


class Reject(Message, frozen=True, tag="refuse"):
    """From schedule: a request that was never opened; passed on to the gateway as `Rejected`."""

    request_id: int
    attempt: int
    gateway: int
    failure: Failure


DetokenizeInbox = Open | Settled | Reject | PrefixCacheReset | PeerRestarted | Start | Ping | Stop
