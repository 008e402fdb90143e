"""A weighted semaphore with a first-come, first-served queue. For one event loop."""

import asyncio
from collections import deque


class Slots:
    """A number of slots; a holder takes several at once. A request for more than all slots waits until all are free."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._num_taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def num_taken(self) -> int:
        return self._num_taken

    @property
    def load(self) -> int:
        """Slots that are taken or waited for."""
        return self._num_taken + sum(num for num, turn in self._waiting if not turn.done())

    async def take(self, num: int) -> None:
        """Wait until `num` slots are free, and take them; return them with `give`.

        The wait has no deadline, because every request ends and then returns its slots.
        """
        if not self._waiting and self._fits(num):
            self._num_taken += num
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._wake()  # later entries may fit now
            else:
                self.give(num)  # the slots were granted just before the cancellation
            raise

    def give(self, num: int) -> None:
        """Return `num` slots."""
        self._num_taken -= num
        assert self._num_taken >= 0, "more slots were returned than were taken"
        self._wake()

    def _fits(self, num: int) -> bool:
        return self._num_taken + num <= self._num_slots or self._num_taken == 0

    def _wake(self) -> None:
        while self._waiting:
            num, turn = self._waiting[0]
            if not turn.cancelled():
                if not self._fits(num):
                    return
                self._num_taken += num
                turn.set_result(None)
            self._waiting.popleft()
