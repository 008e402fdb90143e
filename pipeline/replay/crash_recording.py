"""Records a process from its start for the case that it dies: into memory of the supervisor, and at once, so that the
message that kills the process is in the recording.

Beside a running step the caches are cold, and code costs more to load than to run. So each message is written by two
calls into C, with nothing encoded anew, and a wake by one; the time of a wake is also what its stage reads first.
"""

import logging
import os
import time
from typing import Any

from pipeline.replay import format as f
from pipeline.replay.arrays import copies
from pipeline.replay.recorder import RecordingContext, header_of
from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.runtime.memories import Memories
from pipeline.shm import segment

GROW_BYTES = 64 * 1024
"""The file grows by this. What is not written yet is zero, which ends a recording (format.py)."""
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
            self.size = min(len(self.memory), end + GROW_BYTES)
            try:
                os.ftruncate(self._fd, self.size)
            except OSError as error:
                self.failure = error.strerror or str(error)
        return not self.failure

    def put_end(self) -> None:
        self.is_closed = True

    def wait(self) -> bool:
        return True


class CrashRecording(RecordingContext):
    """Is kept only until the process ends: a recording that ends earlier, because it is full or another one begins,
    does not lead to the death, so its memory is freed."""

    def __init__(self, launch: m.Launch, box: m.BlackBox, memories: Memories, log: logging.Logger) -> None:
        # What the stage sends is left out, to save room: a replay does not need it.
        order = m.Record(0, "", max_bytes=box.recording_bytes, with_sent=False)
        self._fd = box.recording_fd
        self._mapped = MappedWriter(self._fd, box.recording_bytes)
        self._memory = self._mapped.memory
        self._senders: dict[tuple[str, int], int] = {}
        """The kinds of frames with messages of a process, by name and incarnation."""
        self._wake_s = 0.0
        """When the last wake began, by time.monotonic()."""
        self._wake_kind_at = 0
        """Where its frame has its kind, until anything else is written: then 0."""
        header = header_of(launch, order, from_start=True)
        super().__init__(order, header, memories, log, self._mapped)
        self._put_number(f.BEGIN, time.monotonic())

    def monotonic(self) -> float:
        if self._wake_kind_at:
            self._memory[self._wake_kind_at] = f.WAKE_AND_CLOCK
            self._wake_kind_at = 0
            return self._wake_s
        now_s = time.monotonic()
        if not self.is_over:
            self._put_number(f.CLOCK, now_s)
        return now_s

    def received(self, sender: str, incarnation: int, body: bytes, message: Any) -> None:
        if self.is_over:
            return
        self._wake_kind_at = 0
        kind = self._senders.get((sender, incarnation)) or self._add_sender(sender, incarnation)
        for name in ARENAS:
            if name in body:
                body, kind = f.with_arrays(body, copies(message, self._memories)), kind | f.HAS_ARRAYS
                break
        mapped = self._mapped
        begin = mapped.num_bytes
        end = begin + f.HEAD_BYTES + len(body)
        if end <= mapped.size or self._grows(end):
            self._memory[begin + f.HEAD_BYTES : end] = body
            f.put_raw_head(self._memory, begin, f.RAW | len(body), kind)
            mapped.num_bytes = end

    def took(self) -> None:
        if not self.is_over:
            self._wake_s = now_s = time.monotonic()
            begin = self._mapped.num_bytes
            self._put_number(f.WAKE, now_s)
            self._wake_kind_at = 0 if self.is_over else begin + f.KIND_AT

    def sent(self, peer: str, body: bytes, message: Any) -> None:
        pass

    def _put(self, entry: f.Entry) -> None:
        self._wake_kind_at = 0
        super()._put(entry)

    def _put_number(self, kind: int, number: float) -> None:
        mapped = self._mapped
        begin = mapped.num_bytes
        end = begin + f.NUMBER_BYTES
        if end <= mapped.size or self._grows(end):
            f.put_number(self._memory, begin, f.NUMBER, kind, number)
            mapped.num_bytes = end

    def _add_sender(self, sender: str, incarnation: int) -> int:
        kind = f.MESSAGE + (len(self._senders) << f.SENDER_SHIFT)
        self._senders[sender, incarnation] = kind
        body, mapped = f.sender_data(sender, incarnation), self._mapped
        begin = mapped.num_bytes
        if self._grows(end := begin + f.HEAD_BYTES + len(body)):
            self._memory[begin + f.HEAD_BYTES : end] = body
            f.put_raw_head(self._memory, begin, f.RAW | len(body), f.SENDER)
            mapped.num_bytes = end
        return kind

    def _grows(self, end: int) -> bool:
        """Whether there is room up to `end`. Without, the recording ends."""
        if end > self._max_bytes:
            self.finish("it reached its size limit")
            return False
        if not self._mapped.has_room(end):
            self.finish(f"it could not be written: {self._mapped.failure}")
            return False
        return True

    def finish(self, reason: str) -> None:
        if not self.is_over:
            super().finish(reason)
            self._wake_kind_at = 0
            os.ftruncate(self._fd, 0)

    def close(self, reason: str = "the stage ended") -> int:
        super().finish(reason)
        return super().close(reason)


def recording_of(launch: m.Launch, memories: Memories, log: logging.Logger) -> RecordingContext | None:
    """The recording that a launch asks for, or None."""
    box = launch.black_box
    if box is None or box.recording_fd < 0:
        return None
    return CrashRecording(launch, box, memories, log)
