"""Deadlines of requests: when each is, and one heap and one timer for all of them.

    add ──► deadline passes ──► expire(number)
     └────► remove, when its response is over

Removed entries stay in the heap until their deadline passes or they are the majority.
"""

import asyncio
import heapq
import math
import time
from collections.abc import Callable

from pipeline.stages.gateway.open_requests.request import Request
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest

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


class RequestDeadlines:
    """Those of the open requests of one gateway, whose settings may set one for all."""

    def __init__(self, timeout_s: float, expire: Callable[[Request], None]) -> None:
        """`timeout_s` is gateway.request_timeout_s; 0 is none. `expire` is called from the event loop."""
        self._timeout_s = timeout_s
        self._requests: dict[int, Request] = {}
        """By number: those that have a deadline."""
        self._deadlines = Deadlines(lambda number: expire(self._requests[number]))

    def time_of(self, parsed: ParsedRequest) -> tuple[float, float]:
        """What a request may take in all, for errors, and from its arrival here on; 0 and infinite without a limit."""
        timeout_s = parsed.timeout_s or self._timeout_s
        after_s = timeout_s - parsed.age_s if timeout_s else math.inf
        if parsed.left_s is None:
            return timeout_s, after_s
        return timeout_s or parsed.left_s, min(after_s, parsed.left_s)

    def add(self, request: Request, after_s: float) -> None:
        """Call `expire` when the request is older than this."""
        self._requests[request.number] = request
        self._deadlines.add(request.number, request.received_s + after_s)

    def remove(self, request: Request) -> None:
        """Does nothing if it has none."""
        if self._requests.pop(request.number, None) is not None:
            self._deadlines.remove(request.number)
