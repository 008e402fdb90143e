"""Deadlines of requests: one heap and one timer for all of them.

    add ──► deadline passes ──► expire(number)
     └────► remove, when its response is over

Removed entries stay in the heap until their deadline passes or they are the majority.
"""

import asyncio
import heapq
import time
from collections.abc import Callable

SLACK = 64
"""Removed entries that the heap may always hold."""


class Deadlines:
    """Keyed by request numbers. Times are by time.monotonic(). Call `add` in the event loop."""

    def __init__(self, expire: Callable[[int], None]) -> None:
        self._expire = expire
        self._heap: list[tuple[float, int]] = []
        self._live: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0

    def __len__(self) -> int:
        return len(self._live)

    def add(self, number: int, deadline_s: float) -> None:
        """Call `expire(number)` from the loop at the deadline, or as soon as possible if it has passed."""
        self._live.add(number)
        heapq.heappush(self._heap, (deadline_s, number))
        self._wake_at_first()

    def remove(self, number: int) -> None:
        """Does nothing if it was not added or has expired."""
        self._live.discard(number)
        if len(self._heap) > 2 * len(self._live) + SLACK:
            self._heap = [entry for entry in self._heap if entry[1] in self._live]
            heapq.heapify(self._heap)
        if not self._live:
            self._heap.clear()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _wake_at_first(self) -> None:
        first_s = self._heap[0][0]
        if self._timer is not None:
            if self._timer_s <= first_s:
                return
            self._timer.cancel()
        self._timer_s = first_s
        self._timer = asyncio.get_running_loop().call_later(max(0.0, first_s - time.monotonic()), self._wake)

    def _wake(self) -> None:
        self._timer = None
        now_s = time.monotonic()
        due = []
        while self._heap and (self._heap[0][0] <= now_s or self._heap[0][1] not in self._live):
            _, number = heapq.heappop(self._heap)
            if number in self._live:
                self._live.discard(number)
                due.append(number)
        if self._heap:
            self._wake_at_first()
        for number in due:
            self._expire(number)
