"""Answer control requests, which every stage accepts besides its own messages.

A `ControlRequest` arrives in the ordinary inbox, so an answer proves that the loop runs. The stage's own `match` never
sees it. To add one, add a struct to the union `ControlRequest` in messages/control_requests.py, a case here, and a
command that sends it to the supervisor's admin server as a `StageCommand`.
"""

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, assert_never

import msgspec

from pipeline.errors import UserError
from pipeline.metrics.request_timings import RequestTimings
from pipeline.metrics.stats import EdgeCounts, OwnCounts, StageCounts, num_queued
from pipeline.runtime import messages as m
from pipeline.runtime.process.stack_sampler import StackSampler
from pipeline.runtime.tracing import MAX_WINDOW_S, StageTrace, Tracer
from pipeline.runtime.transport.inbox import Inbox
from pipeline.runtime.transport.outbox import Outbox

if TYPE_CHECKING:
    from pipeline.runtime.transport.arrays import Arrays


class StageRecordings(Protocol):
    """Records what a stage receives. What it returns is the answer. All but `close` raise UserError."""

    def start(self, order: m.Record) -> None:
        """Raises OSError if the file can't be written."""

    def keep(self, path: str) -> msgspec.Struct: ...

    def end(self, path: str) -> msgspec.Struct: ...

    def close(self) -> None: ...


class ControlledStage(Protocol):
    """The parts of a `Stage` that control requests read and change."""

    name: str
    trace: Tracer
    inbox: Inbox[Any]
    arrays: "Arrays"
    supervisor: Outbox[m.SupervisorInbox]
    recordings: StageRecordings

    @property
    def outboxes(self) -> Mapping[str, Outbox[Any]]: ...


class TrafficSource(Protocol):
    """Records traffic. Both raise UserError."""

    def start(self, order: m.RecordTraffic) -> None: ...

    def take(self, order: m.TakeTraffic) -> msgspec.Struct: ...


def with_execute_facts(request: m.ControlRequest, facts: m.ExecuteFacts | None) -> m.ControlRequest:
    """A control request with the facts of `Start` if it starts a recording. For the supervisor, which forwards it."""
    return msgspec.structs.replace(request, facts=facts) if isinstance(request, m.Record) else request


class ControlRequests:
    """Answers the control requests of one stage. `UserError` and `OSError` become the answer; other errors end the
    stage."""

    def __init__(self, stage: ControlledStage) -> None:
        self._stage = stage
        self._encoder = msgspec.msgpack.Encoder()
        self._sampler = StackSampler()
        self.own_counts: Callable[[], OwnCounts] | None = None
        """Returns the stage's own counts. Set by stages that have some."""
        self.find_request: Callable[[str], RequestTimings | None] = lambda _: None
        """Returns the timings of an open request. Set by gateways."""
        self.reread_keys: Callable[[], None] = lambda: None
        """Reads the API keys again. Set by gateways."""
        self.traffic: TrafficSource | None = None
        """Notes lengths and prefixes of requests. Set by schedule."""

    def __call__(self, request: m.ControlRequest) -> None:
        try:
            body = self._do(request)
        except (UserError, OSError) as error:
            answer = m.Answer(request.nonce, error=str(error))
        else:
            answer = m.Answer(request.nonce, msgspec.Raw(self._encoder.encode(body)))
        self._stage.supervisor.send(answer)  # if the edge is full, the supervisor reports this stage as late

    def _do(self, request: m.ControlRequest) -> Any:
        """Returns the answer: anything that msgspec encodes."""
        match request:
            case m.Count():
                return self._counts()
            case m.Flame():
                return self._sampler.start()
            case m.EndFlame():
                return self._sampler.stop()
            case m.Record():
                self._stage.recordings.start(request)
                return None
            case m.EndRecord():
                return self._stage.recordings.end(request.path)
            case m.KeepRecord():
                return self._stage.recordings.keep(request.path)
            case m.Trace():
                if not 0 < request.window_s <= MAX_WINDOW_S:
                    raise UserError(f"the trace window must be above 0 and at most {MAX_WINDOW_S:g} s")
                if (left_s := self._stage.trace.left_s) > 0:
                    raise UserError(f"another trace is running, for at most {left_s:.0f} s more")
                return self._stage.trace.start(request.window_s)
            case m.TakeTrace(_, goes_on):
                return StageTrace(self._stage.name, os.getpid(), *self._stage.trace.take(goes_on=goes_on))
            case m.FindRequest():
                return self.find_request(request.response_id)
            case m.RecordTraffic():
                return self._traffic().start(request)
            case m.TakeTraffic():
                return self._traffic().take(request)
            case m.RereadKeys():
                return self.reread_keys()
            case _:
                assert_never(request)

    def _traffic(self) -> "TrafficSource":
        if self.traffic is None:
            raise UserError(f"{self._stage.name} can't record traffic: schedule does")
        return self.traffic

    def _counts(self) -> StageCounts:
        inbox, arena = self._stage.inbox, self._stage.arrays.arena
        own = self.own_counts() if self.own_counts is not None else None
        return StageCounts(
            num_received=inbox.num_received,
            num_stale=inbox.num_stale,
            edges=[
                EdgeCounts(to, outbox.num_sent, outbox.num_refused)
                for to, outbox in self._stage.outboxes.items()
                if not outbox.is_detached
            ],
            own=own,
            num_queued=num_queued(own),
            wait_s=inbox.wait_s,
            num_wakes=inbox.num_wakes,
            arena_bytes=arena.num_bytes if arena is not None else 0,
            arena_bytes_used=arena.num_bytes - arena.num_bytes_free if arena is not None else 0,
        )
