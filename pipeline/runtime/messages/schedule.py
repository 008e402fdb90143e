"""Messages that schedule receives."""

from msgspec import Raw

from pipeline.runtime.messages.common import Abort, ExpectGrammars, Message, Ping, Release, Start, Stop
from pipeline.runtime.messages.requests import MediaItem
from pipeline.runtime.messages.restarts import FailRequests, PeerRestarted, Rescaled
from pipeline.shm.arrays import Array


class Admit(Message, frozen=True, tag="admit"):
    """From ingest: a request that is ready to be computed."""

    request_id: int
    attempt: int
    gateway: int
    arrival_s: float
    prompt_ids: Array
    """int32"""
    options: Raw
    """`GenerationOptions`, which schedule passes on unchanged. `max_tokens` is set, and prompt and output together fit
    into max_model_len."""
    outputs: list[Array] = []
    """int32; output ids that are known already, one array for each sequence; empty for a new request"""
    finishes: bytes = b""
    """uint8, parallel: `Finish`; STOP if the last of these ids ends the sequence, else NONE"""
    gateway_incarnation: int = 1
    """Of the process that has opened the request. If that has died, no one closes it."""
    cut_positions: list[int] = []
    """For a model with recurrent layers: positions of the prompt behind which other prompts are likely to go on in
    another way. The first is where the next turn of this chat does, at the end or before it; empty: not known."""
    scope_id: str = ""
    """That of `Submit`: texts that are computed whole are divided fairly among scopes."""
    media: list[MediaItem] = []
    """The prompt's images. Their pixels stay in the sender's memory until the request ends."""


class StepResult(Message, frozen=True, tag="step_result"):
    """From the executor: the sampled ids of a step. One entry for each of the step's whose `samples` is set, in
    order."""

    incarnation: int
    """Of the scheduler that planned the step."""
    step_id: int
    rows: Array
    """int32"""
    generations: Array
    """uint32, of the rows"""
    ids: Array
    """int32; -1 if the row had ended already"""
    finishes: Array
    """uint8, `Finish`: STOP if the id ends the sequence, ERROR if there is no id, else NONE"""
    compute_s: float
    wait_s: float
    """How long the executor was idle before this step."""
    copy_s: float = 0.0
    """The part of `compute_s` that the step's copies took."""
    token_outputs: Array = b""
    """uint8: the token outputs of `ids`, of the rows that ask for them, one after the other; see
    pipeline/runtime/token_outputs.py. A row that had ended has none."""
    prompt_logprobs: Array = b""
    """uint8: for the entries of the step that ask for logprobs of their prompt, in order, the logprobs of the prompt
    ids that follow each computed position; none for a row that had ended"""
    errors: list[str] = []
    """The reason of each entry whose finish is `ERROR`, in order: no id could be sampled, `ids` has -1, and the
    sequence ends."""
    num_ids: Array = b""
    """int32, parallel with `rows`: how many of `ids` belong to each entry, if ids were proposed: the accepted ones, and
    one more. Empty: one each."""
    num_drafts: Array = b""
    """int32, parallel with `rows`: how many ids were proposed; empty: none."""
    draft_s: float = 0.0
    """The part of `compute_s` that a draft model took."""
    draft_pass_s: float = 0.0
    """Mean time of a pass of the draft model with one position for each row; 0 if it made none."""
    slow_rows: list[int] = []
    """Rows whose grammar mask was slow."""
    slow_s: list[float] = []
    """CPU time of each of these masks."""
    encode_s: float = 0.0
    """The part of `compute_s` that the step's `encodes` took."""


class AdaptersLoaded(Message, frozen=True, tag="adapters_loaded"):
    """From the executor: those LoRA adapters of a `UseAdapters` whose loading is over. One that could not be loaded is
    among them: the first row that needs it gets the error."""

    incarnation: int
    number: int
    """Of the `UseAdapters`."""
    adapter_ids: list[str]


class Closed(Message, frozen=True, tag="closed"):
    """From the gateway: the client has everything; the log of this request can be dropped."""

    request_id: int
    attempt: int


class ResetPrefixCache(Message, frozen=True, tag="reset_prefix_cache"):
    """From the gateway: future prompts must not reuse anything that was computed up to now. Answered with
    `PrefixCacheReset`."""

    gateway: int
    """Replica that asks."""
    nonce: int


class HandOver(Message, frozen=True, tag="hand_over"):
    """From the supervisor: a successor is ready. Plan no more steps; when the results of those in flight are settled
    and sent, answer `Drained`."""


class FallAsleep(Message, frozen=True, tag="fall_asleep"):
    """From the supervisor: plan no more steps before `WakeUp`. When those in flight are settled, have the executor save
    its KV cache (`SaveKV`). The executor's end follows, with a `PeerRestarted`."""

    number: int
    """Counts these messages. 0: the executor is away already, so there is nothing to save."""
    wakes_on_request: bool = False
    """A new request wakes the server (`WakeRequested`)."""


class WakeUp(Message, frozen=True, tag="wake_up"):
    """From the supervisor: plan steps again. The executor is ready."""


ScheduleInbox = (
    Admit
    | Abort
    | StepResult
    | Closed
    | ResetPrefixCache
    | Release
    | PeerRestarted
    | FailRequests
    | Rescaled
    | HandOver
    | Start
    | Ping
    | Stop
    | AdaptersLoaded
    | FallAsleep
    | WakeUp
    | ExpectGrammars
)
