"""Requests from the supervisor that every stage answers beside its work."""

from pipeline.runtime.messages.common import ExecuteFacts, Message


class Count(Message, frozen=True, tag="count"):
    """Answered with the stage's `StageCounts` (see pipeline.metrics.stats)."""

    nonce: int


class Record(Message, frozen=True, tag="record"):
    """Record what the inbox receives from now on; see pipeline.replay. In a `Launch`: from the stage's start."""

    nonce: int
    path: str
    """Absolute; an existing file is replaced."""
    max_bytes: int = 2**32
    max_s: float = 1e9
    """Seconds; unlimited by default."""
    with_sent: bool = True
    """Record what the stage sends too."""
    facts: ExecuteFacts | None = None
    """The facts of `Start`, if it was sent already."""
    lease_s: float = 0.0
    """End the recording if no `KeepRecord` arrives for this long. 0: no lease."""


class EndRecord(Message, frozen=True, tag="end_record"):
    """End the recording. Answered at once with `RecordState` (see pipeline.replay.recorder). A thread writes the rest
    of the file, so ask again until it is closed."""

    nonce: int
    path: str = ""
    """The recording to end; empty is any."""


class Flame(Message, frozen=True, tag="flame"):
    """Sample the stage's stack from now on; see pipeline.runtime.process.stack_sampler. Answered with nil."""

    nonce: int


class EndFlame(Message, frozen=True, tag="end_flame"):
    """End sampling; answered with `Stacks` (see pipeline.runtime.process.stack_sampler)."""

    nonce: int


class Trace(Message, frozen=True, tag="trace"):
    """Collect spans for `window_s` from now on. Answered with nil."""

    nonce: int
    window_s: float


class TakeTrace(Message, frozen=True, tag="take_trace"):
    """Return the spans since the last one; answered with `StageTrace` (see pipeline.runtime.tracing)."""

    nonce: int
    goes_on: bool = False
    """Otherwise the window ends."""


class FindRequest(Message, frozen=True, tag="find_call"):
    """To gateways: the timings of a request that ended recently; answered with `RequestTimings` (see
    pipeline.metrics.request_timings), or nil if the gateway does not know it."""

    nonce: int
    response_id: str


class KeepRecord(Message, frozen=True, tag="keep_record"):
    """Renew the lease of this recording. Answered with `RecordState`."""

    nonce: int
    path: str


class RecordTraffic(Message, frozen=True, tag="record_traffic"):
    """To schedule: note the lengths and prefixes of requests from now on; see pipeline.replay.traffic. Answered with
    nil."""

    nonce: int
    salt: bytes
    """Key of the hashes: 16 to 64 random bytes, which are written nowhere."""
    block_tokens: int
    """Tokens of a block, each of which has a hash."""
    lease_s: float
    """End if no `TakeTraffic` arrives for this long."""


class TakeTraffic(Message, frozen=True, tag="take_traffic"):
    """To schedule: return the requests that have ended since the last one; answered with `TrafficReply` (see
    pipeline.replay.traffic)."""

    nonce: int
    salt: bytes
    """Of the recording: another one is not taken."""
    goes_on: bool = True
    """Otherwise the recording ends, and open requests are returned too."""


class RereadKeys(Message, frozen=True, tag="reread_keys"):
    """To gateways: accept the API keys that `Launch.keys_fd` has now. Answered with nil."""

    nonce: int


ControlRequest = (
    Count
    | Trace
    | TakeTrace
    | FindRequest
    | Record
    | EndRecord
    | Flame
    | EndFlame
    | KeepRecord
    | RecordTraffic
    | TakeTraffic
    | RereadKeys
)
"""Every stage's inbox accepts these besides the stage's own union and passes them to pipeline.runtime.control_requests,
which replies to each with one `Answer`. The stage's loop never sees them. The supervisor sets `nonce`."""
