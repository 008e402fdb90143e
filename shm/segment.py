"""Anonymous shared memory: created and reserved by the supervisor, inherited by descriptor.

    create ──► (children inherit the descriptor) ──► map ──► close
    supervisor                                        child     each holder for itself

A segment has no name in any file system, so nothing can be left behind: the kernel frees it with the last descriptor
and mapping. One process maps it writable, all others read-only.
"""

import errno
import mmap
import os

from pipeline.shm.available import available_bytes


def create(name: str, num_bytes: int) -> int:
    """Create a segment of `num_bytes` and reserve its memory now. Returns its descriptor, closed on exec.

    Raises MemoryError, in words for the user, where the machine can't hold it.
    """
    # The kernel does not refuse an anonymous file that is too large: it fills the memory until it has to kill somebody.
    available = available_bytes()
    if num_bytes > available:
        raise _too_large(name, num_bytes, available)
    fd = os.memfd_create(f"pipeline-{name}", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, num_bytes)
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        os.close(fd)
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        raise _too_large(name, num_bytes, available) from error
    return fd


def _too_large(name: str, num_bytes: int, available: int) -> MemoryError:
    return MemoryError(
        f"cannot reserve {num_bytes / 1024**2:.0f} MiB of shared memory for {name}, where "
        f"{available / 1024**2:.0f} MiB are free: lower {name}.arena_bytes, or free memory"
    )


def attach(fd: int, num_bytes: int, *, writable: bool) -> memoryview:
    """Map a segment. The mapping lives as long as the view that is returned, or views of it; the descriptor may be
    closed."""
    access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    return memoryview(mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED, prot=access))
