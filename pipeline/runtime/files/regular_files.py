"""Reads whole files that others own: a client names them, or another user can change them.

Only regular files, up to a limit. Opening a FIFO or a device does not block. The bytes are read, not mapped: a mapped
file that is truncated kills the process with SIGBUS.
"""

import errno
import mmap
import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

PART_BYTES = 8 * 1024**2
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}


class NotRegular(OSError):
    """It is `kind`, such as "a folder"."""

    def __init__(self, kind: str) -> None:
        super().__init__(errno.EINVAL, f"this is {kind}, not a regular file")
        self.kind = kind


def kind_of(mode: int) -> str:
    """What a file of this mode is, if it is no regular one."""
    return _KINDS.get(stat.S_IFMT(mode), "a device")


def open_regular(path: Path, flags: int = 0) -> int:
    """A descriptor for reading. Raises OSError; NotRegular if it is no regular file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | flags)
    except ValueError as error:  # a NUL character, or half of a surrogate pair
        raise OSError(errno.EINVAL, "this is no file name") from error
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise NotRegular(kind_of(mode))
    except OSError:
        os.close(fd)
        raise
    return fd


class OutsideFolders(OSError):
    """The file is in none of the folders in which it must be."""


class RegularFile:
    """A file that is read in order, as far as its first bytes say that the rest is worth it. Its caller closes it.

    Raises OSError if it can't be opened, is no regular file or has more than `max_bytes`; OutsideFolders if `folders`
    are given, as resolved paths, and the file that was opened is in none of them: what a path led to before says
    nothing about that. `deadline_s` is by time.monotonic()."""

    def __init__(
        self, path: Path, max_bytes: int, deadline_s: float = float("inf"), folders: Sequence[str] = ()
    ) -> None:
        self.path = path
        self._deadline_s = deadline_s
        self._data = memoryview(b"")
        self._fd = open_regular(path)
        try:
            # The kernel's own path of the open file: no part of it is resolved again.
            target = Path(f"/proc/self/fd/{self._fd}").readlink() if folders else None
            if target is not None and not any(target.is_relative_to(folder) for folder in folders):
                raise OutsideFolders(errno.EACCES, "the file is in none of the allowed folders")
            self.size = os.fstat(self._fd).st_size
            """In bytes, when it was opened."""
            if self.size > max_bytes:
                raise OSError(errno.EFBIG, f"the file has {self.size} bytes; at most {max_bytes} are allowed")
        except OSError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._fd)

    def read_to(self, end: int) -> memoryview:
        """The bytes before `end`, or before the end of the file: fewer, if it was truncated since it was opened.
        Raises OSError, also if they are not read at the deadline."""
        position, end = len(self._data), min(end, self.size)
        if position >= end:
            return self._data
        # Not a bytearray: to make one of 700 MB, and to free it, takes a second in which no other thread runs.
        data = memoryview(mmap.mmap(-1, end, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        data[:position] = self._data
        while position < end:
            if time.monotonic() > self._deadline_s:
                raise OSError(errno.ETIMEDOUT, "reading the file took too long")
            if not (num := os.preadv(self._fd, [data[position : min(end, position + PART_BYTES)]], position)):
                break
            position += num
        self._data = data[:position]
        return self._data


def read_regular(path: Path, max_bytes: int, deadline_s: float = float("inf"), folders: Sequence[str] = ()) -> bytes:
    """All bytes of a file. Raises OSError; see `RegularFile`."""
    with RegularFile(path, max_bytes, deadline_s, folders) as file:
        return bytes(file.read_to(file.size))
