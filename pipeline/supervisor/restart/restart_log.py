"""What happened to the stages lately, as spans of a trace: deaths, restarts on purpose, reloads.

    begin ──► the stage has no ready process ──► end

A span is open until then. `pipeline trace` shows those that overlap its window, in a process of their own.
"""

import os
import time
from collections import deque

from pipeline.runtime.topology import SUPERVISOR
from pipeline.runtime.tracing import Args, StageTrace, TraceEvent

MAX_SPANS = 256
"""Spans that are kept; the oldest are dropped."""


class RestartLog:
    """Keeps the latest spans. Each has a subject, such as a stage's name, which has at most one open span."""

    def __init__(self) -> None:
        self._open: dict[str, TraceEvent] = {}
        self._ended: deque[TraceEvent] = deque(maxlen=MAX_SPANS)

    def begin(self, subject: str, what: str, **args: str | int | float) -> None:
        """Something begins to happen, for example a stage has `died`. An open span of this subject ends."""
        self.end(subject)
        self._open[subject] = TraceEvent(f"{subject} {what}", time.monotonic(), 0.0, args, [])

    def end(self, subject: str, **args: str | int | float) -> None:
        """It is over, for example because the stage's next process is ready. Does nothing without an open span."""
        if (span := self._open.pop(subject, None)) is not None:
            self._ended.append(_ended(span, args))

    def trace(self, since_s: float) -> StageTrace:
        """The spans that had not ended before `since_s` (by time.monotonic()), in order. Those that are open end now,
        with the detail `is_over` = 0."""
        spans = [span for span in self._ended if span.end_s >= since_s]
        spans += [_ended(span, {"is_over": 0}) for span in self._open.values()]
        return StageTrace(SUPERVISOR, os.getpid(), sorted(spans, key=lambda span: span.begin_s), 0)


def _ended(span: TraceEvent, args: Args) -> TraceEvent:
    end_s = time.monotonic()
    more: Args = {"took_s": round(end_s - span.begin_s, 3)}
    return TraceEvent(span.name, span.begin_s, end_s, span.args | more | args, span.requests)
