"""A bound on what is open at once, first come, first served. For one event loop."""

import asyncio
from collections import deque


class Slots:
    """Some slots, of which each holder has a number. One that wants more than there are gets all of them alone."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._num_taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def num_taken(self) -> int:
        return self._num_taken

    async def take(self, num: int) -> None:
        """Wait until `num` slots are free, and take them; to be given back with `give`.

        No deadline of its own: who is before in the queue gives back at the end of a request, and each has an end.
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
                self._wake()  # those behind may fit
            else:
                self.give(num)  # it was our turn just now
            raise

    def give(self, num: int) -> None:
        """Give back as many as were taken."""
        self._num_taken -= num
        assert self._num_taken >= 0, "more slots were given back than were taken"
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
