"""A log file that several processes append to, and a writer whose callers never wait for it.

    event loop ──line──► a bounded buffer ──20 times a second──► a thread ──► the file, rotated by size
                             └── full, or the file can't be written: the lines are dropped and counted

A line is written in one piece with others, at most PIECE_BYTES, so processes don't mix theirs. The file may be renamed
or removed by others, such as logrotate: then a new one is begun. Only one process rotates at a time (flock).
"""

import contextlib
import fcntl
import logging
import os
import stat
import sys
import threading
import time
from pathlib import Path

from pipeline.own_files import descriptor
from pipeline.runtime.log.event_log import EventLog

PIECE_BYTES = 64 * 1024
MAX_WAITING_BYTES = 8 * 1024**2
"""Lines of about 300 bytes: those of 25,000 requests."""
INTERVAL_S = 0.05
LOCK_S = 1.0
"""Time that a process waits for another that rotates. It takes less than a millisecond, unless the other is stopped."""
CLOSE_S = 1.0
"""Time to write what waits when the process ends."""


class RotatingFile:
    """The file. Only one thread uses it; it may block."""

    def __init__(self, path: Path, max_bytes: int, max_files: int) -> None:
        """Open it. Raises OSError."""
        self._path, self._max_bytes, self._max_files = path.absolute(), max_bytes, max_files
        self._fd = -1
        self._is_torn = False
        """The last line in the file has no end, because the disk was full."""
        self._open()

    def write(self, data: bytes) -> None:
        """Append. Raises OSError: then some of it may be missing."""
        if not self._is_current():
            self._open()
        if (size := os.fstat(self._fd).st_size) and size + len(data) > self._max_bytes:
            self._rotate(len(data))
        if self._is_torn:
            data = b"\n" + data
        num = 0
        try:
            while num < len(data):
                num += os.write(self._fd, data[num:])
        finally:
            if num:
                self._is_torn = not data[:num].endswith(b"\n")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        """Other users can't plant a link to another file: the folder and the file must be this user's or root's."""
        self.close()
        self._is_torn = False
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with descriptor(self._path.parent) as folder:
            fd = os.open(self._path.name, flags, 0o600, dir_fd=folder)
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
            os.close(fd)
            raise PermissionError(1, "it is no regular file of this user")
        self._fd = fd

    def _is_current(self) -> bool:
        """Whether the path still leads to the open file."""
        if self._fd < 0:
            return False
        try:
            now = os.lstat(self._path)
        except FileNotFoundError:
            return False
        before = os.fstat(self._fd)
        return (now.st_dev, now.st_ino) == (before.st_dev, before.st_ino)

    def _rotate(self, num_bytes: int) -> None:
        """Begin a new file, unless another process has begun one. If another rotates for longer than LOCK_S, the file
        grows meanwhile. Raises OSError."""
        if not self._lock():
            return
        try:
            if self._is_current() and os.fstat(self._fd).st_size + num_bytes > self._max_bytes:
                self._rename()
        finally:
            self.close()  # releases the lock, also if a file can't be renamed: others would wait for it
        self._open()

    def _lock(self) -> bool:
        end_s = time.monotonic() + LOCK_S
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            if time.monotonic() >= end_s:
                return False
            time.sleep(LOCK_S / 200)

    def _rename(self) -> None:
        name = self._path.name
        with descriptor(self._path.parent) as folder:
            for number in range(self._max_files - 1, -1, -1):
                before = f"{name}.{number}" if number else name
                with contextlib.suppress(FileNotFoundError):
                    os.rename(before, f"{name}.{number + 1}", src_dir_fd=folder, dst_dir_fd=folder)


class StandardError:
    """The process's standard error in place of a file."""

    def write(self, data: bytes) -> None:
        _write(sys.stderr.fileno(), data)

    def close(self) -> None:
        pass


class LogWriter:
    """Writes lines in a thread, which begins with the first line. `write` never waits."""

    def __init__(self, file: RotatingFile | StandardError) -> None:
        self._file = file
        self._lines: list[bytes] = []
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._has_lines, self._is_closing = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self.num_dropped = 0
        """Lines that were not written. Two threads count, each while it has the lock."""
        self._why = ""
        """Why the newest were dropped."""

    def write(self, line: bytes) -> None:
        """`line` ends with a line break. After `close` it is dropped."""
        with self._lock:
            if self._is_closing.is_set() or self._num_bytes + len(line) > MAX_WAITING_BYTES:
                self.num_dropped += 1
                is_slow = not self._is_closing.is_set()
                self._why = "they are written more slowly than they come" if is_slow else "the log was closed"
                return
            self._lines.append(line)
            self._num_bytes += len(line)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="access log", daemon=True)
                self._thread.start()
        self._has_lines.set()

    def report(self, log: EventLog) -> None:
        """Log how many lines were dropped since the last time."""
        log.update(self.num_dropped, why=self._why)

    def close(self) -> None:
        """Write what waits, for CLOSE_S at most."""
        with self._lock:  # no line comes after those that the thread takes last
            self._is_closing.set()
        self._has_lines.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
        if self._thread is None or not self._thread.is_alive():
            self._file.close()

    def _run(self) -> None:
        while True:
            self._has_lines.wait()
            self._has_lines.clear()
            is_last = self._is_closing.wait(INTERVAL_S)  # more lines come meanwhile
            with self._lock:
                lines, self._lines = self._lines, []
            self._write_all(lines)
            if is_last:
                return

    def _write_all(self, lines: list[bytes]) -> None:
        """Write lines in pieces. They count as waiting until they are written."""
        while lines:
            num, size = 0, 0
            while num < len(lines) and (not num or size + len(lines[num]) <= PIECE_BYTES):
                size += len(lines[num])
                num += 1
            piece, lines = lines[:num], lines[num:]
            problem = ""
            try:
                self._file.write(b"".join(piece))
            except OSError as error:
                problem = error.strerror or str(error)
            with self._lock:
                self._num_bytes -= size
                if problem:
                    self.num_dropped += num
                    self._why = problem


def dropped_log(log: logging.Logger) -> EventLog:
    """For `LogWriter.report`."""
    return EventLog(log, "lines of the access log were dropped")


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
