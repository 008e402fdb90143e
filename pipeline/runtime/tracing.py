"""Spans of a stage's work, recorded on demand; `pipeline trace` writes them as a Chrome trace.

A stage has one `Tracer`. Traced code reads the clock for its counters anyway, so while tracing is off it only costs the
check of `trace.on`. While it is on, events go into a ring buffer. A full ring overwrites the oldest and counts them as
lost.
"""

import time
from collections.abc import Iterable

import msgspec

CAPACITY = 1 << 15
"""Number of events in the ring."""
MAX_WINDOW_S = 600.0

Args = dict[str, int | float | str]


class TraceEvent(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A span, or a sample of counters if `end_s` is 0. Times are by time.monotonic()."""

    name: str
    begin_s: float
    end_s: float
    args: Args
    requests: list[int]
    """Ids of the requests in this span, for spans that show the path of a request."""


class StageTrace(msgspec.Struct, array_like=True, frozen=True):
    """The trace of one stage."""

    stage: str
    pid: int
    records: list[TraceEvent]
    num_lost: int


class Tracer:
    """Off until `start`. Turns itself off at the end of the window, because the client that started it may be gone."""

    def __init__(self) -> None:
        self.on = False
        self._ring: list[TraceEvent | None] = []
        self._num_records = 0
        self._end_s = 0.0

    def start(self, window_s: float) -> None:
        """Drop old events, and record for `window_s`."""
        self._ring = [None] * CAPACITY
        self._num_records = 0
        self._end_s = time.monotonic() + window_s
        self.on = True

    @property
    def left_s(self) -> float:
        """Time left in the window; 0 if tracing is off."""
        return max(0.0, self._end_s - time.monotonic()) if self.on else 0.0

    def span(self, name: str, begin_s: float, end_s: float, args: Args, requests: Iterable[int] = ()) -> None:
        """Record finished work. Call it only while `on` is set."""
        self._keep(TraceEvent(name, begin_s, end_s, args, list(dict.fromkeys(requests))), end_s)

    def counters(self, name: str, at_s: float, values: Args) -> None:
        self._keep(TraceEvent(name, at_s, 0.0, values, []), at_s)

    def _keep(self, record: TraceEvent, at_s: float) -> None:
        if at_s > self._end_s:
            self.on = False
            return
        self._ring[self._num_records % CAPACITY] = record
        self._num_records += 1

    def take(self, *, goes_on: bool = False) -> tuple[list[TraceEvent], int]:
        """Returns the events since the last call, oldest first, and the number of lost ones. Unless it `goes_on`, the
        window ends."""
        index = self._num_records % CAPACITY
        self.on = self.on and goes_on
        ring, self._ring = self._ring, [None] * CAPACITY if self.on else []
        num_lost = max(0, self._num_records - CAPACITY)
        self._num_records = 0
        return [record for record in (*ring[index:], *ring[:index]) if record is not None], num_lost
