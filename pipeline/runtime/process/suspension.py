"""Notices that this process did not run: it was stopped and continued, or its container or machine was paused.

Its clock went on meanwhile, but what a deadline waits for could not happen: the other processes, and perhaps the
client, did not run either. So that time must not count against them.
"""

import time
from collections.abc import Callable

MIN_S = 3.0
"""Longer than a process that runs is busy with other things."""


def missed(due_s: float) -> bool:
    """Whether this process did not run when a timer was due, by time.monotonic() or an event loop's time."""
    return time.monotonic() >= due_s + MIN_S


class Suspension:
    """Watches the time between the turns of a loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._turned_s = clock()
        self._sleep_s = 0.0

    def begin(self) -> None:
        """The loop begins: the time before it was spent elsewhere."""
        self._turned_s, self._sleep_s = self._clock(), 0.0

    def sleep(self, seconds: float) -> None:
        """The loop is going to wait, and this much of that is no sign of a suspension."""
        self._sleep_s = max(0.0, seconds)

    def turn(self) -> float:
        """Call it once per turn. Returns the seconds since the last turn, without those of `sleep`, if this process was
        suspended then, else 0."""
        now_s = self._clock()
        took_s = now_s - self._turned_s - self._sleep_s
        self._turned_s, self._sleep_s = now_s, 0.0
        return took_s if took_s >= MIN_S else 0.0
