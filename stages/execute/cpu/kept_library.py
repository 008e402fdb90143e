"""A copy of the kernels' library that outlives the executor: the supervisor owns its memory.

A successor computes with the same machine code, so its numbers are the same, and it compiles nothing: the cache may
have removed the file meanwhile, the compiler may be gone or another one, and the disk may be full.

    first executor ──keep──► memory of the supervisor ──load──► each successor
"""

import os
from ctypes import CDLL
from pathlib import Path

from pipeline.kernels.cpu import library_file, native_library
from pipeline.runtime.messages import Backend


class KeptLibrary:
    """What one executor's process leaves to its successor."""

    def __init__(self, fd: int = -1, before: Backend | None = None, *, wakes: bool = False) -> None:
        """`fd` is the memory, empty at first; -1: there is none. `before` is the back end of the process that this one
        replaces; None for the first one. It `wakes` if that one has left a saved KV cache (saved_kv.py)."""
        self._fd = fd
        self.before, self.wakes = before, wakes

    def keep(self, library: CDLL) -> None:
        """Copy a loaded library. Raises OSError if it can't be read, or if there is no memory."""
        if self._fd < 0:
            return
        data = memoryview(library_file.content(library))
        os.ftruncate(self._fd, 0)  # of a start that has failed
        num_written = 0
        while num_written < len(data):
            num_written += os.pwrite(self._fd, data[num_written:], num_written)

    def load(self) -> CDLL | None:
        """The library that was kept; None without one. Raises OSError and IsaUnavailableError as
        `native_library.load`."""
        if self._fd < 0 or not os.fstat(self._fd).st_size:
            return None
        return native_library.load_open(self._fd, Path("the library that was kept"))


NOTHING_KEPT = KeptLibrary()
