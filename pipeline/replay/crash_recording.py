"""Records a process from its start for the case that it dies: into memory of the supervisor, and at once, so that the
message that kills the process is in the recording."""

import logging
import os
import time
from typing import Any

from pipeline.replay import format as f
from pipeline.replay.arrays import copies
from pipeline.replay.recorder import RecordingContext, header_of
from pipeline.runtime import messages as m
from pipeline.runtime.memories import Memories
from pipeline.shm import segment

GROW_BYTES = 64 * 1024
"""The file grows by this. What is not written yet is zero, which ends a recording (format.py)."""
END_BYTES = 4096
"""Room for the last frame, beside the maximum."""


class MappedWriter:
    """Writes frames into memory of the supervisor, which maps a file. A system call for each frame would take longer
    than everything else about it."""

    is_closed = False
    num_pending_bytes = 0

    def __init__(self, fd: int, max_bytes: int) -> None:
        self._fd = fd
        self._size = 0
        self.num_bytes = 0
        self.failure = ""
        os.ftruncate(fd, max_bytes + END_BYTES)
        self._memory = segment.attach(fd, max_bytes + END_BYTES, writable=True)
        os.ftruncate(fd, 0)

    def put(self, data: bytes) -> None:
        begin = self.num_bytes
        self.num_bytes = end = begin + len(data)
        if end > self._size:
            self._grow()
        if not self.failure:
            self._memory[begin:end] = data

    def put_raw(self, kind: int, data: bytes) -> None:
        begin = self.num_bytes
        self.num_bytes = end = begin + f.HEAD_BYTES + len(data)
        if end > self._size:
            self._grow()
        if not self.failure:
            self._memory[begin + f.HEAD_BYTES : end] = data
            f.put_raw_head(self._memory, begin, len(data), kind)

    def _grow(self) -> None:
        self._size = min(len(self._memory), self.num_bytes + GROW_BYTES)
        try:
            os.ftruncate(self._fd, self._size)
        except OSError as error:
            self.failure = error.strerror or str(error)

    def put_end(self) -> None:
        self.is_closed = True

    def wait(self) -> bool:
        return True


class CrashRecording(RecordingContext):
    """Is kept only until the process ends: a recording that ends earlier, because it is full or another one begins,
    does not lead to the death, so its memory is freed.

    Every process has one, so what is done for each message is done here in fewer calls than in the base class: beside a
    running step the caches are cold, and code costs more to load than to run.
    """

    def __init__(self, launch: m.Launch, box: m.BlackBox, memories: Memories, log: logging.Logger) -> None:
        # What the stage sends is left out, to save room: a replay does not need it.
        order = m.Record(0, "", max_bytes=box.recording_bytes, with_sent=False)
        self._fd = box.recording_fd
        self._mapped = MappedWriter(self._fd, box.recording_bytes)
        header = header_of(launch, order, from_start=True)
        super().__init__(order, header, memories, log, self._mapped)
        self._senders: dict[str, bytes] = {}

    def monotonic(self) -> float:
        now_s = time.monotonic()
        if not self.is_over:
            self._put_raw(f.CLOCK, f.clock_data(now_s))
        return now_s

    def received(self, sender: str, incarnation: int, body: bytes, message: Any) -> None:
        if not self.is_over:
            name = self._senders.get(sender) or self._senders.setdefault(sender, sender.encode())
            self._put_raw(f.MESSAGE, f.message_data(name, incarnation, body, copies(message, self._memories)))

    def took(self) -> None:
        if not self.is_over:
            self._put_raw(f.WAKE, f.wake_data(time.monotonic_ns() - self._begun_ns))

    def _put_raw(self, kind: int, data: bytes) -> None:
        if self._mapped.num_bytes + f.HEAD_BYTES + len(data) > self._max_bytes:
            self.finish("it reached its size limit")
            return
        self._mapped.put_raw(kind, data)
        if self._mapped.failure:
            self.finish(f"it could not be written: {self._mapped.failure}")

    def finish(self, reason: str) -> None:
        if not self.is_over:
            super().finish(reason)
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
