"""Anonymous shared memory: the supervisor creates and reserves it, the stages inherit its descriptor.

    create ──► (children inherit the descriptor) ──► attach ──► close
    supervisor                                       child      every holder

A large segment that is not needed at once is reserved by a thread (`Reservation`) while stages load.

A segment has no name in a file system, so nothing is left behind: the kernel frees it with the last descriptor and
mapping. One process maps it writable, all others read-only.
"""

import errno
import mmap
import os
import threading

from pipeline.shm.available import available_bytes

PART_BYTES = 64 * 1024**2
"""Bytes that a `Reservation` reserves at once, which takes about 15 ms."""

NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG)


def create(name: str, num_bytes: int, key: str = "") -> int:
    """Create a segment and reserve its memory now. Returns its descriptor, which is closed on exec.

    `key` is the setting of its size, by default that of a stage's arena. Raises MemoryError with a message for the
    user if too little memory is available.
    """
    key = key or f"{name.partition('.')[0]}.arena_bytes"
    # The kernel does not refuse an anonymous file that is too large: it fills the memory until the OOM killer acts.
    available = available_bytes()
    if num_bytes > available:
        raise _too_large(name, num_bytes, available, key)
    fd = os.memfd_create(f"pipeline-{name}", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, num_bytes)
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        os.close(fd)
        if error.errno not in NO_ROOM:
            raise
        raise _too_large(name, num_bytes, available, key) from error
    return fd


def create_sparse(name: str, num_bytes: int) -> int:
    """Create a segment whose pages take memory when they are first written. Returns its descriptor, which is closed on
    exec. For a segment of which little is used: if memory runs out, the writer is killed."""
    fd = os.memfd_create(f"pipeline-{name}", os.MFD_CLOEXEC)
    os.fchmod(fd, 0o600)
    os.ftruncate(fd, num_bytes)
    return fd


def _too_large(name: str, num_bytes: int, available: int, key: str) -> MemoryError:
    return MemoryError(
        f"cannot reserve {num_bytes / 1024**2:.0f} MiB of shared memory for {name}: only "
        f"{available / 1024**2:.0f} MiB are available; lower {key}, or free memory"
    )


class Reservation:
    """A segment whose memory a thread reserves, part by part.

    `key` is the setting of its size; `others_bytes` is memory that others are going to allocate. The creator owns `fd`
    and closes it after `close`. The constructor raises MemoryError with a message for the user if too little memory is
    available; `check` raises it if that shows later.
    """

    def __init__(self, name: str, num_bytes: int, key: str, others_bytes: int = 0) -> None:
        available = max(0, available_bytes() - others_bytes)
        self._name, self._num_bytes, self._key = name, num_bytes, key
        if num_bytes > available:
            raise _too_large(name, num_bytes, available, key)
        self.fd = os.memfd_create(f"pipeline-{name}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, num_bytes)
            self._ended = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError as error:
            os.close(self.fd)
            if error.errno not in NO_ROOM:
                raise
            raise _too_large(name, num_bytes, available, key) from error
        self._error: BaseException | None = None
        self._is_done = self._is_cancelled = False
        self._thread = threading.Thread(target=self._run, name=f"reserve-{name}", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """A descriptor that becomes readable when the thread is done."""
        return self._ended

    def check(self) -> bool:
        """Whether all memory is reserved. Raises MemoryError with a message for the user if there was too little."""
        if not self._is_done:
            return False
        if self._error is not None:
            raise self._error
        return True

    def close(self) -> None:
        """Stop the thread, done or not."""
        self._is_cancelled = True
        self._thread.join()
        os.close(self._ended)

    def _run(self) -> None:
        try:
            for begin in range(0, self._num_bytes, PART_BYTES):
                size = min(PART_BYTES, self._num_bytes - begin)
                if self._is_cancelled:
                    return
                if size > (available := available_bytes()):
                    raise _too_large(self._name, self._num_bytes, begin + available, self._key)
                os.posix_fallocate(self.fd, begin, size)
        except OSError as error:
            is_full = error.errno in NO_ROOM
            self._error = _too_large(self._name, self._num_bytes, begin, self._key) if is_full else error
        except MemoryError as error:
            self._error = error
        finally:
            self._is_done = True
            os.eventfd_write(self._ended, 1)


def attach(fd: int, num_bytes: int, *, writable: bool) -> memoryview:
    """Map a segment. The mapping lives as long as the returned view and views of it; the descriptor may be closed."""
    access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    return memoryview(mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED, prot=access))
