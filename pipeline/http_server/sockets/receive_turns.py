"""Every read of a connection takes a turn, so that one turn of the event loop receives little.

    read ──► wait: not read ──more arrives──► its turn ──► read again

Without that, the loop reads 256 KiB of every connection that has sent something, and handles it, before it does
anything else: a thousand connections that send at the same moment would stop all others, however fair the work behind
is.

The loop does not watch a connection that waits. An epoll of their own tells which of them can be read, so silent ones
cost nothing.
"""

import asyncio
import contextlib
import select
import time
from typing import Protocol

from pipeline.runtime.queues.fair_queue import FairQueue

NUM_READS = 8
"""Connections that are read in one turn of the loop: 2 MiB at most, which takes about 2 ms, as the handling of eight
small requests does."""
MAX_READ_S = 0.005
"""No connection is read after this CPU time of a turn of the loop, if reading takes that, as over TLS, or for
heads with many headers."""
MAX_EVENTS = 256
"""Connections that get a place in the queue in one turn of the loop."""
_EVENTS = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLONESHOT


class Receiver(Protocol):
    """A connection."""

    @property
    def address(self) -> str:
        """Of its client: turns are shared among addresses."""

    @property
    def descriptor(self) -> int:
        """Of its socket, also after its end."""

    @property
    def num_read(self) -> int:
        """Bytes of its last read, or of a body so far: one that sent much does so again, and does not make others
        wait."""

    def go_on(self) -> None:
        """Read once, and then wait for the next turn."""

    def __hash__(self) -> int: ...


class ReceiveTurns:
    """The turns of one process's connections. Belongs to one loop."""

    def __init__(self, num_reads: int = NUM_READS) -> None:
        self._num_reads = num_reads
        self._queue: FairQueue[Receiver, None] = FairQueue()
        self._epoll: select.epoll | None = None
        self._known: dict[int, Receiver] = {}
        """By descriptor. Those that the epoll has."""
        self._watched: set[Receiver] = set()
        """Those of which nothing has arrived yet."""
        self._num_read = 0
        """In this turn of the loop."""
        self._took_s = 0.0
        self._is_due = False

    def wait(self, receiver: Receiver) -> None:
        """Call `go_on` when something has arrived, and it is the receiver's turn. It must not be read until then."""
        if receiver in self._watched or receiver in self._queue:
            return
        if self._epoll is None:
            self._epoll = select.epoll()
            asyncio.get_running_loop().add_reader(self._epoll.fileno(), self._arrived)
        descriptor = receiver.descriptor
        if self._known.get(descriptor) is receiver:
            self._epoll.modify(descriptor, _EVENTS)
        else:
            # What had the descriptor before has been closed, with which the epoll forgets it.
            self._epoll.register(descriptor, _EVENTS)
            self._known[descriptor] = receiver
        self._watched.add(receiver)

    def remove(self, receiver: Receiver) -> None:
        """The connection has ended, or does not wait any more. Idempotent."""
        self._watched.discard(receiver)
        self._queue.remove(receiver)
        if self._known.get(receiver.descriptor) is receiver:
            del self._known[receiver.descriptor]
            if self._epoll is not None:
                with contextlib.suppress(OSError):  # it is closed
                    self._epoll.unregister(receiver.descriptor)

    def close(self) -> None:
        """Idempotent. The next connection that waits opens it again."""
        if self._epoll is not None:
            asyncio.get_running_loop().remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._epoll = None
            self._known.clear()
            self._watched.clear()

    def _arrived(self) -> None:
        assert self._epoll is not None
        arrived = []
        for descriptor, _ in self._epoll.poll(0, MAX_EVENTS):
            receiver = self._known.get(descriptor)
            if receiver is not None and receiver in self._watched:
                self._watched.discard(receiver)
                arrived.append(receiver)
        # Where all have their turns now, the queue has nothing to decide.
        if len(arrived) + len(self._queue) <= self._num_reads - self._num_read:
            while arrived and self._has_room:
                self._read(arrived.pop(0))
        for receiver in arrived:
            self._queue.push(receiver, None, receiver.address, max(1, receiver.num_read))
        self._go_on()

    def _go_on(self) -> None:
        while self._queue and self._has_room and (turn := self._queue.pop()) is not None:
            self._read(turn[0])

    def _read(self, receiver: Receiver) -> None:
        self._num_read += 1
        begin_s = time.thread_time()
        receiver.go_on()
        self._took_s += time.thread_time() - begin_s
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    @property
    def _has_room(self) -> bool:
        return self._num_read < self._num_reads and self._took_s < MAX_READ_S

    def _next_turn(self) -> None:
        self._is_due, self._num_read, self._took_s = False, 0, 0.0
        self._go_on()
