"""Connections that send much take turns, so that one turn of the event loop receives little.

    read ──► heard ──much──► held: not read ──its turn──► read again
                    └─little─► goes on

Without that, the loop reads 256 KiB of every connection that has sent something before it does anything else: with a
hundred uploads that takes longer than most requests take as a whole, and each of these needs several turns.
"""

import asyncio
from typing import Protocol

from pipeline.runtime.fair_queue import FairQueue

MUCH_BYTES = 16 * 1024
"""A read of this size takes a turn. Most requests are smaller."""
NUM_READS = 4
"""Connections that are read in one turn of the loop, after they sent much: 1 MiB, which takes about 1 ms."""
MAX_SENDERS = 256
"""Connections that may be held together because they have sent much and may do so again. Those that have been silent
for longer count as new ones: idle connections would cost the turns of those that send."""


class Receiver(Protocol):
    """A connection."""

    @property
    def address(self) -> str:
        """Of its client: turns are shared among addresses."""

    def hold(self) -> None:
        """Stop reading."""

    def go_on(self) -> None:
        """Read again."""

    def __hash__(self) -> int: ...


class ReceiveTurns:
    """The turns of one process's connections. Belongs to one loop."""

    def __init__(self) -> None:
        self._queue: FairQueue[Receiver, None] = FairQueue()
        self._senders: dict[Receiver, None] = {}
        """Those that sent much at their last read and may be read again, the most silent first."""
        self._num_read = 0
        """In this turn of the loop."""
        self._is_due = False

    def heard(self, receiver: Receiver, num_bytes: int) -> None:
        """`num_bytes` were read. Holds the connection if they are many, until its next turn."""
        if num_bytes < MUCH_BYTES:
            return
        self._hold(receiver)
        self._num_read += 1
        if self._num_read == NUM_READS:
            for other in list(self._senders):  # they had their turn before, and all send at the same time
                self._hold(other)

    def remove(self, receiver: Receiver) -> None:
        """The connection has ended."""
        self._senders.pop(receiver, None)
        self._queue.remove(receiver)

    def _hold(self, receiver: Receiver) -> None:
        self._senders.pop(receiver, None)
        if receiver not in self._queue:
            receiver.hold()
            self._queue.push(receiver, None, receiver.address, 1)
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._is_due, self._num_read = False, 0
        for _ in range(NUM_READS):
            if (turn := self._queue.pop()) is None:
                break
            self._senders[turn[0]] = None
            turn[0].go_on()
        while len(self._senders) > MAX_SENDERS:
            del self._senders[next(iter(self._senders))]
        if self._queue:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._next_turn)
