"""When room will be free, from the rate at which requests have given it back lately. Pure."""

import math
from collections import deque
from typing import NamedTuple

WINDOW_S = 30.0
"""Time over which the rate of ending requests is measured."""
MAX_ENDS = 256
"""Ends of requests that are kept for this."""
MIN_RETRY_S, MAX_RETRY_S = 1, 60
"""Bounds of Retry-After."""


class Amounts(NamedTuple):
    """What a request takes of each limit."""

    sequences: int = 0
    tokens: int = 0
    num_bytes: int = 0


class EndRates:
    """Of one set of limits. Times are by time.monotonic()."""

    def __init__(self) -> None:
        self._busy_since_s = 0.0
        self._ends: deque[tuple[float, Amounts]] = deque(maxlen=MAX_ENDS)

    def begin(self, now_s: float) -> None:
        """The first request is opened while none is open."""
        self._busy_since_s = now_s

    def end(self, now_s: float, freed: Amounts) -> None:
        """A request has ended."""
        self._ends.append((now_s, freed))

    def retry_after_s(self, now_s: float, lacking: Amounts) -> int:
        """An estimate of the time until so much is free. If none has ended, it is the time since the first began."""
        begin_s = max(self._busy_since_s, now_s - WINDOW_S)
        if len(self._ends) == MAX_ENDS:
            begin_s = max(begin_s, self._ends[0][0])
        span_s, wait_s = now_s - begin_s, 0.0
        ends = [freed for at_s, freed in self._ends if at_s >= begin_s]
        for index, num in enumerate(lacking):
            if num:
                freed = sum(one[index] for one in ends)
                wait_s = max(wait_s, span_s * num / freed if freed else span_s)
        return min(MAX_RETRY_S, max(MIN_RETRY_S, math.ceil(wait_s)))
