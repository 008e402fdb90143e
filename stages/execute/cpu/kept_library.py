"""A copy of the kernels' library that outlives the executor: the supervisor owns its memory.

A successor computes with the same machine code, so its numbers are the same, and it compiles nothing: the cache may
have removed the file meanwhile, the compiler may be gone or another one, and the disk may be full.

    first executor ──keep──► memory of the supervisor ──load──► each successor
"""

import hashlib
import os
from ctypes import CDLL
from pathlib import Path

from pipeline.kernels.cpu import build, native
from pipeline.runtime.messages import Backend


class KeptLibrary:
    """What one executor's process leaves to its successor."""

    def __init__(self, fd: int = -1, before: Backend | None = None) -> None:
        """`fd` is the memory, empty at first; -1: there is none. `before` is the back end of the process that this one
        replaces; None for the first one."""
        self._fd = fd
        self.before = before

    def keep(self, library: Path) -> None:
        """Copy a library. Raises OSError if it can't be read, or if there is no memory."""
        if self._fd < 0:
            return
        data = memoryview(library.read_bytes())
        os.ftruncate(self._fd, 0)  # of a start that has failed
        num_written = 0
        while num_written < len(data):
            num_written += os.pwrite(self._fd, data[num_written:], num_written)

    def load(self) -> CDLL | None:
        """The library that was kept; None without one. Raises OSError if it can't be loaded, and RefusedError as
        `native.load`."""
        data = b"" if self._fd < 0 else os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        if not data:
            return None
        # Loading a truncated file would kill the process instead of failing.
        if hashlib.sha256(data[: -build.SEAL_BYTES]).digest() != data[-build.SEAL_BYTES :]:
            raise OSError("the library that was kept for it is not complete")
        return native.load(Path(f"/proc/self/fd/{self._fd}"))


NOTHING_KEPT = KeptLibrary()
