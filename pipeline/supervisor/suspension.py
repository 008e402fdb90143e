"""Notices that this process itself did not run: it was stopped and continued, or its container or machine was paused.

Its clock went on meanwhile. No stage could answer it, so that time must not count against them.
"""

import time
from collections.abc import Callable

MIN_S = 3.0
"""Longer than a turn of the supervisor's loop takes, with its longest wait."""


class Suspension:
    """Watches the time between the turns of a loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._turned_s = clock()

    def begin(self) -> None:
        """The loop begins: the time before it was spent elsewhere."""
        self._turned_s = self._clock()

    def turn(self) -> float:
        """Call it once per turn. Returns the seconds since the last turn if this process was suspended then, else 0."""
        now_s = self._clock()
        took_s, self._turned_s = now_s - self._turned_s, now_s
        return took_s if took_s >= MIN_S else 0.0
