"""Records a process from its start for the case that it dies: into memory of the supervisor, and at once, so that the
message that kills the process is in the recording.

Beside a running step the caches are cold, and code costs more to load than to run. So each message is written by two
calls into C, with nothing encoded anew, and a turn by one; the time of a turn is also what its stage reads first.

When it is full, its older half goes (rotation.py).
"""

import logging
import os
import time
from collections.abc import Callable
from typing import Any

import msgspec

from pipeline.replay import format as f
from pipeline.replay.arrays import copies
from pipeline.replay.recorder import RecordingContext, header_of
from pipeline.replay.rotation import facts_in, turn_behind
from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.runtime.transport.memories import Memories
from pipeline.shm import segment

GROW_BYTES = 64 * 1024
"""The file grows by this, or by an eighth of the maximum. What is not written yet is zero, which ends a recording
(format.py)."""
END_BYTES = 4096
"""Room for the last frame, beside the maximum."""
ARENAS = tuple(f"{row.name}.".encode() for row in topology.TOPOLOGY if row.has_arena)
"""How the names of segments begin: an encoded message without any of these has no reference to shared memory."""


class MappedWriter:
    """Writes frames into memory of the supervisor, which maps a file. A system call for each frame would take longer
    than everything else about it."""

    is_closed = False
    num_pending_bytes = 0

    def __init__(self, fd: int, max_bytes: int) -> None:
        self._fd = fd
        self._grow_bytes = min(GROW_BYTES, max_bytes // 8)
        self.size = 0
        """Bytes that the file has."""
        self.num_bytes = 0
        self.failure = ""
        os.ftruncate(fd, max_bytes + END_BYTES)
        self.memory = segment.attach(fd, max_bytes + END_BYTES, writable=True)
        os.ftruncate(fd, 0)

    def put(self, data: bytes) -> None:
        if self.has_room(end := self.num_bytes + len(data)):
            self.memory[self.num_bytes : end] = data
        self.num_bytes = end

    def has_room(self, end: int) -> bool:
        """Let the file grow to at least `end` bytes. Returns whether it can be written."""
        if end > self.size:
            self.size = min(len(self.memory), end + self._grow_bytes)
            try:
                os.ftruncate(self._fd, self.size)
            except OSError as error:
                self.failure = error.strerror or str(error)
        return not self.failure

    def keep_from(self, begin: int, first: bytes) -> None:
        """Keep what was written from `begin` on, behind `first`. If the process is killed meanwhile, it leaves no
        recording."""
        num_first, num_magic = len(first), len(f.MAGIC)
        end = num_first + self.num_bytes - begin
        self.memory[:num_magic] = bytes(num_magic)
        self.memory[num_first:end] = self.memory[begin : self.num_bytes]
        self.memory[num_magic:num_first] = first[num_magic:]
        os.ftruncate(self._fd, end)
        self.memory[:num_magic] = first[:num_magic]
        self.num_bytes = self.size = end

    def put_end(self) -> None:
        self.is_closed = True

    def wait(self) -> bool:
        return True


class CrashRecording(RecordingContext):
    """Is kept only until the process ends: a recording that ends earlier, because another one begins, does not lead to
    the death, so its memory is freed."""

    def __init__(
        self, launch: Callable[[], m.Launch], box: m.BlackBox, memories: Memories, log: logging.Logger
    ) -> None:
        """`launch` returns that of the process, with its present peers and segments."""
        # What the stage sends is left out, to save room: a replay does not need it.
        order = m.Record(0, "", max_bytes=box.recording_bytes, with_sent=False)
        self._fd = box.recording_fd
        self._mapped = MappedWriter(self._fd, box.recording_bytes)
        self._memory = self._mapped.memory
        self._launch = launch
        self._order = order
        self._facts: m.ExecuteFacts | None = None
        self._middle = 0
        """Where the first frame behind half of the room begins."""
        self._senders: dict[tuple[str, int], int] = {}
        """The kinds of frames with messages of a process, by name and incarnation."""
        self._turn_s = 0.0
        """When the last wake began, by time.monotonic()."""
        self._turn_kind_at = 0
        """Where its frame has its kind, until anything else is written: then 0."""
        header = header_of(launch(), order, from_start=True)
        super().__init__(order, header, memories, log, self._mapped)
        self._put_number(f.BEGIN, time.monotonic())

    def monotonic(self) -> float:
        if self._turn_kind_at:
            self._memory[self._turn_kind_at] = f.TURN_AND_CLOCK
            self._turn_kind_at = 0
            return self._turn_s
        now_s = time.monotonic()
        if not self.is_over:
            self._put_number(f.CLOCK, now_s)
        return now_s

    def received(self, sender: str, incarnation: int, body: bytes, message: Any) -> None:
        if self.is_over:
            return
        self._turn_kind_at = 0
        kind = self._senders.get((sender, incarnation)) or self._add_sender(sender, incarnation)
        for name in ARENAS:
            if name in body:
                body, kind = f.with_arrays(body, copies(message, self._memories)), kind | f.HAS_ARRAYS
                break
        self._put_body(kind, body)

    def end_turn(self) -> None:
        if not self.is_over:
            self._turn_s = now_s = time.monotonic()
            self._put_number(f.TURN, now_s)
            self._turn_kind_at = 0 if self.is_over else self._mapped.num_bytes - f.NUMBER_BYTES + f.KIND_AT

    def sent(self, peer: str, body: bytes, message: Any) -> None:
        pass

    def _put(self, entry: f.Entry) -> None:
        self._turn_kind_at = 0
        if self.is_over:
            return
        mapped, data = self._mapped, f.frame(entry)
        if mapped.num_bytes + len(data) > mapped.size and not self._has_room(len(data)):
            return
        begin = mapped.num_bytes
        mapped.num_bytes = end = begin + len(data)
        self._memory[begin:end] = data

    def _put_body(self, kind: int, body: bytes) -> None:
        mapped = self._mapped
        size = f.HEAD_BYTES + len(body)
        if mapped.num_bytes + size > mapped.size and not self._has_room(size):
            return
        begin = mapped.num_bytes
        mapped.num_bytes = end = begin + size
        self._memory[begin + f.HEAD_BYTES : end] = body
        f.put_raw_head(self._memory, begin, f.RAW | len(body), kind)

    def _put_number(self, kind: int, number: float) -> None:
        mapped = self._mapped
        if mapped.num_bytes + f.NUMBER_BYTES > mapped.size and not self._has_room(f.NUMBER_BYTES):
            return
        f.put_number(self._memory, mapped.num_bytes, f.NUMBER, kind, number)
        mapped.num_bytes += f.NUMBER_BYTES

    def _add_sender(self, sender: str, incarnation: int) -> int:
        number = len(self._senders) << f.SENDER_SHIFT
        self._put_body(f.SENDER + number, f.sender_data(sender, incarnation))
        self._senders[sender, incarnation] = f.MESSAGE + number
        return f.MESSAGE + number

    def _has_room(self, size: int) -> bool:
        """Make room for a frame of this size. If there is none, the recording ends."""
        mapped = self._mapped
        if mapped.num_bytes > self._max_bytes // 2 and not self._middle:
            self._middle = mapped.num_bytes
        if mapped.num_bytes + size > self._max_bytes and not self._rotate(size):
            self.finish("it reached its size limit")
        elif not mapped.has_room(mapped.num_bytes + size):
            self.finish(f"it could not be written: {mapped.failure}")
        return not self.is_over

    def _rotate(self, size: int) -> bool:
        """Drop the older half. Returns whether there is room for a frame of this size then."""
        mapped = self._mapped
        self._facts = self._facts or facts_in(self._memory, mapped.num_bytes)
        found = turn_behind(self._memory, self._middle, mapped.num_bytes) if self._middle else None
        if found is None or self._facts is None:
            return False
        begin, begin_s = found
        order = msgspec.structs.replace(self._order, facts=self._facts)
        parts = [f.MAGIC, f.frame(header_of(self._launch(), order, from_start=False)), f.number_frame(f.BEGIN, begin_s)]
        for (sender, incarnation), kind in self._senders.items():
            parts.append(f.raw_frame(kind - f.MESSAGE + f.SENDER, f.sender_data(sender, incarnation)))
        first = b"".join(parts)
        if len(first) + mapped.num_bytes - begin + size > self._max_bytes:
            return False
        mapped.keep_from(begin, first)
        self._middle = self._turn_kind_at = 0
        return True

    def finish(self, reason: str) -> None:
        if not self.is_over:
            super().finish(reason)
            self._turn_kind_at = 0
            os.ftruncate(self._fd, 0)

    def close(self, reason: str = "the stage ended") -> int:
        super().finish(reason)
        return super().close(reason)


def recording_of(launch: Callable[[], m.Launch], memories: Memories, log: logging.Logger) -> RecordingContext | None:
    """The recording that a launch asks for, or None."""
    box = launch().black_box
    if box is None or box.recording_fd < 0:
        return None
    return CrashRecording(launch, box, memories, log)
