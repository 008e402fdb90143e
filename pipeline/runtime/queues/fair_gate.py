"""Admits a few tasks at a time, in an order that is fair to the API keys they work for.

await gate.enter(scope, cost) ──► the work, in a task, a thread or another process ──► gate.leave(scope)
"""

import asyncio
import itertools
from collections import Counter

from pipeline.runtime.queues.fair_queue import FairQueue


class FairGate:
    """Has `capacity`, of which each scope takes at most `num_per_scope`. Belongs to one loop."""

    def __init__(self, capacity: int, num_per_scope: int) -> None:
        self._capacity = capacity
        self._num_per_scope = num_per_scope
        self._num_inside: Counter[str] = Counter()
        self._queue: FairQueue[int, asyncio.Future[None]] = FairQueue()
        self._numbers = itertools.count()
        self._is_closed = self._is_held = False

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_inside(self) -> int:
        return self._num_inside.total()

    async def enter(self, scope: str, cost: int) -> None:
        """Take a place, at once if there is one. `cost` is as in `FairQueue.push`. The caller limits the time, and must
        call `leave` when the work has ended. If this is cancelled, it has no place."""
        number = next(self._numbers)
        admitted = asyncio.get_running_loop().create_future()
        self._queue.push(number, admitted, scope, cost)
        self._admit()
        if admitted.done():
            return
        try:
            await admitted
        except asyncio.CancelledError:
            if self._queue.remove(number) is None and not admitted.cancelled():
                self.leave(scope)  # it was admitted at the same time
            raise

    def leave(self, scope: str) -> None:
        """Give a place back."""
        self._num_inside[scope] -= 1
        if self._num_inside[scope] <= 0:
            del self._num_inside[scope]
        self._admit()

    def hold(self, is_held: bool) -> None:
        """Whether none of those that wait is admitted. Idempotent."""
        self._is_held = is_held
        self._admit()

    def close(self) -> None:
        """Admit no more."""
        self._is_closed = True

    def _admit(self) -> None:
        while not (self._is_closed or self._is_held) and self._num_inside.total() < self._capacity:
            full = [scope for scope, num in self._num_inside.items() if num >= self._num_per_scope]
            if (turn := self._queue.pop(without=full)) is None:
                return
            _, admitted, scope = turn
            if not admitted.done():
                self._num_inside[scope] += 1
                admitted.set_result(None)
