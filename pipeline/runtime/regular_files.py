"""Reads whole files that others own: a client names them, or another user can change them.

Only regular files, up to a limit. Opening a FIFO or a device does not block. The bytes are read, not mapped: a mapped
file that is truncated kills the process with SIGBUS.
"""

import errno
import os
import stat
import time
from pathlib import Path

PART_BYTES = 8 * 1024**2
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}


def open_regular(path: Path, flags: int = 0) -> int:
    """A descriptor for reading. Raises OSError, also if it is no regular file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | flags)
    except ValueError as error:  # a NUL character, or half of a surrogate pair
        raise OSError(errno.EINVAL, "this is no file name") from error
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, f"this is {_KINDS.get(stat.S_IFMT(mode), 'a device')}, not a regular file")
    except OSError:
        os.close(fd)
        raise
    return fd


def read_regular(path: Path, max_bytes: int, deadline_s: float = float("inf")) -> bytearray:
    """All bytes of a file. Raises OSError if it can't be read, is no regular file or has more than `max_bytes`, or if
    it is not read at `deadline_s`, by time.monotonic()."""
    fd = open_regular(path)
    try:
        size = os.fstat(fd).st_size
        if size > max_bytes:
            raise OSError(errno.EFBIG, f"the file has {size} bytes; at most {max_bytes} are allowed")
        data = bytearray(size)
        view, place = memoryview(data), 0
        while place < size:
            if time.monotonic() > deadline_s:
                raise OSError(errno.ETIMEDOUT, "reading the file took too long")
            if not (num := os.preadv(fd, [view[place : place + PART_BYTES]], place)):
                break
            place += num
        view.release()
        del data[place:]  # it was truncated meanwhile
        return data
    finally:
        os.close(fd)
