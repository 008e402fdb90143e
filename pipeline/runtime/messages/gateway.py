"""Messages that the gateway receives."""

from typing import Literal

import msgspec

from pipeline.metrics.stats import ScheduleLoad, ServerStats
from pipeline.runtime.messages.common import Adapters, DraftCounts, Failure, FirstTimes, Message, Ping, Start, Stop
from pipeline.runtime.messages.requests import ReasoningBudget
from pipeline.runtime.messages.restarts import FailRequests, PeerRestarted, Rescaled
from pipeline.shm.arrays import Array


class Accepted(Message, frozen=True, tag="accepted"):
    """From ingest: the prompt's ids. The gateway counts them, and can submit the request again without running the
    chat template twice."""

    request_id: int
    attempt: int
    prompt_ids: Array
    """int32"""
    text: str | None = None
    """The prompt's text, if `Submit.prompt_options` asks for it: as the client wrote it, or decoded from its ids. If
    output follows, a character whose last bytes are in the output is left to it."""
    token_strs: list[str] | None = None
    """The vocabulary's name of each id, if `Submit.prompt_options` asks for it."""
    began_s: float = 0.0
    """When ingest began with the request. Like every other `_s` of its kind by time.monotonic(), which all processes
    of a machine share."""
    done_s: float = 0.0
    """When it had the ids."""
    pieces: list[bytes] | None = None
    """The bytes of text of each id, if `Submit.prompt_options` asks for it."""
    tail: str | None = None
    """How the reply to a chat begins, if `Submit.prompt_options` asks for it: the last mark of reasoning that its
    template has written behind the last message, empty if it has written none; see pipeline/text/formats. Ingest
    decides it: the ids don't show which marks are the client's."""
    compiled_grammar: str | None = None
    """The grammar of the request, checked and converted, if it has one: submitted again, it needs no check."""
    segment_start: int = 0
    """As in `GenerationOptions`: submitted again, the request has only ids."""
    reasoning_budget: ReasoningBudget | None = None
    """As in `GenerationOptions`, too."""


class Rejected(Message, frozen=True, tag="rejected"):
    """From ingest, or from schedule through detokenize. Closes every sequence of the request."""

    request_id: int
    attempt: int
    failure: Failure


class Deltas(Message, frozen=True, tag="deltas"):
    """From detokenize, or for pooled prompts from schedule: progress of some sequences. Parallel lists, at most one
    entry for each sequence."""

    request_ids: list[int]
    attempts: list[int]
    indexes: list[int]
    texts: list[str]
    text_offsets: list[int]
    """Characters of the sequence's text before this one."""
    ids: bytes
    """int32; the ids of all entries, one after the other."""
    id_offsets: list[int]
    """Output ids of the sequence before these."""
    num_ids: list[int]
    finishes: list[int]
    """`Finish` values."""
    stop_reasons: list[str | int | None]
    """The stop string or stop id that ended the sequence, if one did."""
    firsts: list[FirstTimes] = []
    """Of the entries with the first sampled id of their sequence."""
    settled_s: float = 0.0
    """When schedule sent the newest of these ids."""
    sent_s: float = 0.0
    """When this was sent."""
    token_outputs: list[bytes] = []
    """By entry, the token outputs of its ids, or nothing if the request has none; see
    pipeline/runtime/token_outputs.py. Empty if no entry has any; likewise the next."""
    pieces: list[list[bytes]] = []
    """By entry, if `GenerationOptions.with_pieces` is set: for each token output the bytes of its id, then of its top
    ids."""
    prompt_indices: list[int] = []
    """Entries with logprobs of their prompt's ids; the next three are parallel. Such an entry may have no ids."""
    prompt_offsets: list[int] = []
    """Logprobs of the prompt before these."""
    prompt_logprobs: list[bytes] = []
    """Of prompt ids, from the second on"""
    prompt_pieces: list[list[bytes]] = []
    """If `GenerationOptions.with_pieces` is set: the bytes of the top ids in each token output. Those of the prompt's
    own ids are in `Accepted`."""
    errors: list[str] = []
    """The reason of each entry whose finish is `ERROR`, in order; empty if none is known."""
    drafts: list[DraftCounts] = []
    """Of the entries whose request has a predicted output, if ids were proposed."""
    special_indices: list[int] = []
    """Entries whose ids have special tokens, if `GenerationOptions.with_special_spans` is set."""
    special_spans: list[bytes] = []
    """Parallel: their spans in the sequence's text; see pipeline/text/special_spans.py. A span may go beyond the text
    that has been sent: the rest is held back, because it may begin a stop string."""


class StageHealth(msgspec.Struct, array_like=True, frozen=True):
    name: str
    pid: int
    state: str
    """starting, ready, late (did not answer in time), recovering, joining, leaving, sleeping, waking, stopping or
    dead"""
    answer_ms: float
    """Time to answer; -1 without an answer."""


class Health(Message, frozen=True, tag="health"):
    nonce: int
    status: str
    """ok, or the worst state of its stages: dead, recovering, late, stopping, starting, waking, sleeping"""
    stages: list[StageHealth]
    schedule: ScheduleLoad | None
    num_open_elsewhere: int = 0
    """Requests that are open at other gateways."""
    num_nan: int = 0
    """Sequences that failed because their logits were NaN, since the executor's start."""
    last_nan_s: float = 0.0
    """When the last one did: Unix time in seconds."""
    reason: str = ""
    """Why a server that was asked to wake up sleeps on."""


FinishAt = Literal["request", "sentence", "now"]


NO_LIMIT_S = 365 * 86400.0
"""The deadline of a drain without one."""


class Drain(Message, frozen=True, tag="drain"):
    """Accept no more requests; answer `Drained` when the last stream has ended. Streams that are open at the deadline
    end with a final event that names the reason."""

    deadline_s: float
    """Seconds from now."""
    is_leaving: bool = False
    """Other gateways go on serving: requests that still come here are accepted until no stream is open."""
    has_successor: bool = False
    """So does another server, at the same sockets: this gateway accepts no more connections."""
    finish: FinishAt = "request"
    """When open replies end, if not by themselves: at the end of a sentence, or now."""
    closing_text: str = ""
    """Of the operator, behind the text of a reply that ends early."""
    is_again: bool = False
    """It replaces an earlier one, whose deadline is later."""


class StageDied(Message, frozen=True, tag="stage_died"):
    """The server is going down: end every stream with this reason."""

    stage: str
    reason: str


class StatsAnswer(Message, frozen=True, tag="stats_answer"):
    """From the supervisor: the stats of the whole server."""

    nonce: int
    stats: ServerStats


class SleepSet(Message, frozen=True, tag="sleep_set"):
    """From the supervisor: the answer to `SetSleep` and `AskSleep`."""

    nonce: int
    is_sleeping: bool
    problem: str = ""
    """Why it does not sleep, or is not awake; empty if it did what was asked for."""


class LateStages(Message, frozen=True, tag="late_stages"):
    """From the supervisor, whenever a stage goes late or is back: all stages that are late now. Parallel lists."""

    names: list[str]
    """Processes, such as `execute.0`."""
    since_s: list[float]
    """When each was last known to run, by time.monotonic(); later by the time in which all processes were suspended."""
    silent_since_s: list[float] = []
    """The same without that time, so requests that arrived later have come after the last sign of it. Empty: as
    `since_s`."""


class AbortRequests(Message, frozen=True, tag="abort_calls"):
    """From another gateway, on behalf of a client: abort these requests, or end their reasoning. Answered with
    `RequestsAborted`."""

    gateway: int
    """Replica that asks."""
    nonce: int
    names: list[str]
    """Ids of responses, or clients' own ids of their requests."""
    scope: str = ""
    """Scope of the client's API key (see pipeline.runtime.security.api_keys); requests of other scopes are not aborted.
    Empty: no key."""
    ends_reasoning: bool = False
    """Only their reasoning ends; the answer follows."""


class RequestsAborted(Message, frozen=True, tag="calls_aborted"):
    """From another gateway: the reply to `AbortRequests`."""

    gateway: int
    """Replica that answers."""
    nonce: int
    indices: list[int]
    """Indexes into `AbortRequests.names` of the requests that were open here; or whose reasoning was ended."""


class PrefixCacheReset(Message, frozen=True, tag="prefix_cache_reset"):
    """From schedule through detokenize: the answer to `ResetPrefixCache`."""

    gateway: int
    """Replica that asked."""
    nonce: int
    num_blocks: int
    """KV blocks that left the prefix cache."""


class AdapterSet(Message, frozen=True, tag="adapter_set"):
    """From the supervisor: the answer to `SetAdapter`."""

    nonce: int
    is_taken: bool = False
    """Nothing was changed: the adapter was to be new, and there is one with its name."""


GatewayInbox = (
    Accepted
    | Rejected
    | Deltas
    | Health
    | Drain
    | StageDied
    | AbortRequests
    | RequestsAborted
    | StatsAnswer
    | PrefixCacheReset
    | LateStages
    | Adapters
    | AdapterSet
    | PeerRestarted
    | FailRequests
    | Rescaled
    | Start
    | Ping
    | Stop
    | SleepSet
)
