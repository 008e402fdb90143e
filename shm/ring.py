"""A ring of messages in shared memory, for one sending and one receiving process.

    RingWriter.put ──► data segment, written by the sender ──► RingReader.take
                       position segment, written by the receiver
                       eventfd: how many messages were put

A message is copied into the ring and the eventfd is raised by one: one system call to send, one to wake the receiver.
The receiver takes as many messages as the eventfd counts, so it never looks at bytes that are still being written: the
two system calls order the memory accesses of the two processes. Its position tells the sender which bytes are free. No
system call comes with it, so fences (fence.py) keep the receiver's reads before its store of the position, and the
sender's writes behind its load. Where fences are not known to do that, edges use sockets (topology.py).

    data   [… free … | length, kind, bytes, padding | length, kind, bytes, padding | … free …] published
                     ↑ position of the receiver                                     ↑ position of the sender

A message that can wait is put without a system call: the sender publishes how many messages there are then, and the
receiver sees them when it is awake for another reason and looks. If it is not, the eventfd tells it of them later.

A process needs tens of microseconds to wake, more on a virtual machine. So a sender that is about to put
a message can wake the receiver before (`wake`), which then waits for the message awake.

Both positions count bytes since the start and never wrap; their difference is what waits.
"""

import os
from contextlib import suppress
from struct import Struct
from typing import NamedTuple

from pipeline.shm.fence import Fence

_HEAD = Struct("<II")
"""Length and kind of a message."""

POSITION_BYTES = 8
"""Size of the position segment."""
PUBLISHED_BYTES = 8
"""At the end of the data segment: the number of messages that were put until the last one without a wake."""
_ALIGNMENT = 8

WHOLE = 0
ELSEWHERE = 1
"""Kind of a message that was too large for the ring: it has no bytes here, and travels another way."""
ANNOUNCED_BYTES = _HEAD.size
"""Of a message of kind `ELSEWHERE`."""

_WAKE = 1 << 32
"""What a wake without a message adds to the eventfd. A ring has no room for so many messages."""


class RingMessage(NamedTuple):
    data: bytes
    is_elsewhere: bool


class RingWriter:
    """The sender's end. `data` [num_bytes] is writable, `position` [8] is the receiver's; num_bytes is a multiple of 8,
    and the same for both ends. The descriptor of the eventfd stays the caller's. `reserved_bytes`
    are for announcements alone, so that they can be made while the ring is full of messages."""

    def __init__(self, data: memoryview, position: memoryview, event_fd: int, reserved_bytes: int) -> None:
        assert len(data) % _ALIGNMENT == 0 and len(data) > reserved_bytes, f"a ring of {len(data)} bytes"
        self._data, self._num_bytes, self._reserved_bytes = data, len(data) - PUBLISHED_BYTES, reserved_bytes
        self._published = data[self._num_bytes :].cast("Q")
        self._num_put = 0
        self._taken = position[:POSITION_BYTES].cast("Q")
        self._event_fd = event_fd
        self._position = 0
        self._num_quiet = 0
        """Messages that the eventfd has not counted."""
        self._fence = Fence()

    def put(self, *bodies: bytes, wakes: bool = True) -> bool:
        """Put messages, or return False, and put none of them, if there is no room for all of them now. The receiver
        sees them at once if this `wakes` it, else when it looks, with `notify`, or with the next message that wakes
        it."""
        needed = 0
        for body in bodies:
            needed += _padded(_HEAD.size + len(body))
        if self._position + needed - self._taken[0] > self._num_bytes - self._reserved_bytes:
            return False
        self._fence()
        for body in bodies:
            self._write(body, WHOLE)
        self._num_quiet += len(bodies)
        self._num_put += len(bodies)
        if wakes:
            self.notify()
        else:
            self._fence()
            self._published[0] = self._num_put
        return True

    def notify(self) -> None:
        """Let the receiver know of the messages that were put without a wake, unless it has taken them."""
        if self._num_quiet and self._taken[0] < self._position:
            os.eventfd_write(self._event_fd, self._num_quiet)
            self._num_quiet = 0

    def can_announce(self, num: int = 1) -> bool:
        """Whether there is room for so many announcements."""
        return self._position + num * _HEAD.size - self._taken[0] <= self._num_bytes

    def announce(self, num: int = 1) -> None:
        """Put the announcements of messages that travel another way. Call it only if `can_announce`."""
        assert self.can_announce(num), "messages were sent that can't be announced"
        self._fence()
        for _ in range(num):
            self._write(b"", ELSEWHERE)
        self._num_quiet += num
        self._num_put += num
        self.notify()

    def wake(self) -> None:
        """Wake the receiver, because a message follows in a moment: see `RingReader.was_woken`."""
        os.eventfd_write(self._event_fd, _WAKE)

    def _write(self, body: bytes, kind: int) -> None:
        size = len(body)
        at = self._position % self._num_bytes
        _HEAD.pack_into(self._data, at, size, kind)
        at = (at + _HEAD.size) % self._num_bytes
        first = min(size, self._num_bytes - at)
        self._data[at : at + first] = body[:first]
        if first < size:
            self._data[: size - first] = body[first:]
        self._position += _padded(_HEAD.size + size)


class RingReader:
    """The receiver's end: `position` is writable. The eventfd must not block."""

    def __init__(self, data: memoryview, position: memoryview, event_fd: int) -> None:
        self._data, self._num_bytes = data, len(data) - PUBLISHED_BYTES
        self._published = data[self._num_bytes :].cast("Q")
        self._taken = position[:POSITION_BYTES].cast("Q")
        self._event_fd = event_fd
        self._position = 0
        self._num_counted = 0
        """Messages that the eventfd has counted."""
        self._num_early = 0
        """Those that were seen before."""
        self.num_waiting = 0
        """Messages that were seen and not taken."""
        self.was_woken = False
        """The sender called `wake`, and no message was counted since."""
        self._fence = Fence()

    def fileno(self) -> int:
        """The descriptor that is readable when there are messages, or wakes, that were not counted yet."""
        return self._event_fd

    def count(self) -> int:
        """The number of messages that `take` can return now. Makes the descriptor unreadable until the next event."""
        with suppress(BlockingIOError):
            wakes, messages = divmod(os.eventfd_read(self._event_fd), _WAKE)
            num_known = min(messages, self._num_early)
            self._num_early -= num_known
            self._num_counted += messages
            self.num_waiting += messages - num_known
            self.was_woken = not messages and (self.was_woken or wakes > 0)
        return self.num_waiting

    def look(self) -> None:
        """See the messages that were put without a wake: `take` can return them now."""
        num_new = self._published[0] - self._num_counted - self._num_early
        if num_new > 0:
            self._fence()
            self._num_early += num_new
            self.num_waiting += num_new

    def take(self) -> RingMessage | None:
        """The next message, or None if there is none now."""
        if not self.num_waiting and not self.count():
            return None
        self.num_waiting -= 1
        at = self._position % self._num_bytes
        size, kind = _HEAD.unpack_from(self._data, at)
        at = (at + _HEAD.size) % self._num_bytes
        first = min(size, self._num_bytes - at)
        body = bytes(self._data[at : at + first])
        if first < size:
            body += self._data[: size - first]
        self._position += _padded(_HEAD.size + size)
        self._fence()
        self._taken[0] = self._position
        return RingMessage(body, kind == ELSEWHERE)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
