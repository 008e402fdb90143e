"""Writes log lines in a thread, so that no loop waits for a reader that has stopped: a pager, a terminal after Ctrl-S,
a service whose pipe is full.

    what logs ──line──► the thread ──► standard error
        └── waits until it is written, so that the lines before a crash are there, but not for a reader that has stopped
"""

import logging
import os
import select
import threading
from collections.abc import Callable
from typing import IO

WAIT_S = 0.01
"""A line takes less than a millisecond. After one that takes longer, nothing waits until all are written: the reader
has stopped."""
BUSY_WAIT_S = 0.04
"""The same if there is room for a line: the cores or the disk are busy."""
MAX_WAITING_BYTES = 1024**2
"""Beyond it, lines are dropped and counted."""
FLUSH_S = 1.0
"""Time to write what waits when the process ends."""


class LogHandler(logging.Handler):
    """Lines that can't be written are dropped, and counted in a line as soon as one can be written again."""

    def __init__(self, stream: IO[str]) -> None:
        super().__init__()
        self._stream = stream
        try:
            self._fd = stream.fileno()
        except (OSError, ValueError):  # a stream in memory
            self._fd = -1
        self.keep: Callable[[bytes], None] = lambda _: None
        """Called with each line before it is written, also with those that are dropped."""
        self._begin()

    def _begin(self) -> None:
        """Nothing waits. Again in a process that was forked: the thread and the lines that wait are its parent's."""
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._lines: list[bytes] = []
        self._num_bytes = 0
        """Of lines that are not written yet."""
        self._is_slow = self._is_torn = False
        """The last line that was written has no end, because the disk was full."""
        self._num_dropped, self._why = 0, ""
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = f"{self.format(record)}\n".encode("utf-8", "backslashreplace")
        except Exception:  # noqa: BLE001 - what is logged must not end what logs it
            self.handleError(record)
            return
        self.keep(line)
        if self._pid != os.getpid():
            self._begin()
        with self._changed:
            if self._num_bytes + len(line) > MAX_WAITING_BYTES:
                self._num_dropped, self._why = self._num_dropped + 1, "they were read more slowly than they came"
                return
            self._lines.append(line)
            self._num_bytes += len(line)
            self._start_thread()
            self._changed.notify_all()
            if not (self._is_slow or self._wait(WAIT_S)):
                self._is_slow = not (self._has_room() and self._wait(BUSY_WAIT_S))

    def _start_thread(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="log", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the limit of threads, or the interpreter ends
                self._write_one()
            else:
                self._thread = thread

    def flush(self) -> None:
        """Called when the process ends."""
        if self._pid != os.getpid():
            return
        with self._changed:
            self._wait(WAIT_S if self._is_slow else FLUSH_S)

    def _wait(self, timeout_s: float) -> bool:
        return self._changed.wait_for(lambda: not self._num_bytes, timeout_s)

    def _has_room(self) -> bool:
        """Whether a line can be written now, as far as the system knows."""
        if self._fd < 0:
            return True
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        return bool(poll.poll(0))

    def _run(self) -> None:
        while True:
            self._write_one()

    def _write_one(self) -> None:
        """Wait for a line, and write it."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines)
            line, num_dropped = self._lines.pop(0), self._num_dropped
        problem = self._write(self._dropped_line(num_dropped) + line if num_dropped else line)
        with self._changed:
            self._num_bytes -= len(line)
            if problem:
                self._num_dropped, self._why = self._num_dropped + 1, problem
            else:
                self._num_dropped -= num_dropped
            self._is_slow = self._is_slow and bool(self._num_bytes)
            self._changed.notify_all()

    def _dropped_line(self, num: int) -> bytes:
        record = logging.LogRecord("pipeline", logging.WARNING, "", 0, "log lines were dropped", None, None)
        record.__dict__["fields"] = {"num": num, "why": self._why}
        return f"{self.format(record)}\n".encode()

    def _write(self, data: bytes) -> str:
        """Returns why it could not be written, or an empty text."""
        if self._is_torn:
            data = b"\n" + data
        view = memoryview(data)
        try:
            while view:
                view = view[self._write_some(view) :]
        except (OSError, ValueError) as error:
            self._is_torn |= len(view) < len(data)
            return str(getattr(error, "strerror", None) or error)
        self._is_torn = False
        return ""

    def _write_some(self, view: memoryview) -> int:
        if self._fd < 0:
            self._stream.write(bytes(view).decode())
            return len(view)
        while True:
            try:
                return os.write(self._fd, view)
            except BlockingIOError:  # another process has made it non-blocking, as shells do with terminals
                select.select([], [self._fd], [])
