"""Spans of a stage's work, recorded while somebody has asked for them: `pipeline trace` makes a Chrome trace of them.

A stage has one `Tracer`. A place that may be traced reads the clock anyway, for its counters, and asks `trace.on`: that
is all that tracing costs while it is off. While it is on, records go into a ring of fixed size: when it is full the
oldest are overwritten, and counted as lost.
"""

import time
from collections.abc import Iterable

import msgspec

CAPACITY = 1 << 15
"""Records a process keeps."""
MAX_WINDOW_S = 600.0

Args = dict[str, int | float | str]


class TraceEvent(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A span, or where `end_s` is 0, a sample of counters. Times are by time.monotonic()."""

    name: str
    begin_s: float
    end_s: float
    args: Args
    requests: list[int]
    """Ids of the requests that go through this span, where it is one of the few that a request is followed by."""


class StageTrace(msgspec.Struct, array_like=True, frozen=True):
    """What a stage has recorded."""

    stage: str
    pid: int
    records: list[TraceEvent]
    num_lost: int


class Tracer:
    """Off until `start`, and off again by itself when the window is over: whoever opened it may be gone."""

    def __init__(self) -> None:
        self.on = False
        self._ring: list[TraceEvent | None] = []
        self._num_records = 0
        self._end_s = 0.0

    def start(self, window_s: float) -> None:
        """Forget what there is, and record for so long."""
        self._ring = [None] * CAPACITY
        self._num_records = 0
        self._end_s = time.monotonic() + window_s
        self.on = True

    @property
    def left_s(self) -> float:
        """How long the window goes on if nobody ends it; 0 where there is none."""
        return max(0.0, self._end_s - time.monotonic()) if self.on else 0.0

    def span(self, name: str, begin_s: float, end_s: float, args: Args, requests: Iterable[int] = ()) -> None:
        """Work that was done. To be called where `on` is set."""
        self._keep(TraceEvent(name, begin_s, end_s, args, list(dict.fromkeys(requests))), end_s)

    def counters(self, name: str, at_s: float, values: Args) -> None:
        self._keep(TraceEvent(name, at_s, 0.0, values, []), at_s)

    def _keep(self, record: TraceEvent, at_s: float) -> None:
        if at_s > self._end_s:
            self.on = False
            return
        self._ring[self._num_records % CAPACITY] = record
        self._num_records += 1

    def take(self) -> tuple[list[TraceEvent], int]:
        """End the window, and return its records, oldest first, and how many were lost. A second call has none."""
        self.on = False
        place = self._num_records % CAPACITY
        ring, self._ring = self._ring, []
        num_lost = max(0, self._num_records - CAPACITY)
        self._num_records = 0
        return [record for record in (*ring[place:], *ring[:place]) if record is not None], num_lost
