"""Memory that all ranks map."""

import mmap
import os
from typing import Any

import numpy as np

from pipeline.errors import UserError

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def pages_of(num_bytes: int) -> int:
    """So many bytes, rounded up to whole pages, at least one."""
    return max(-(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE, mmap.PAGESIZE)


def map_shared(fd: int, begin: int, num_bytes: int, who: str, *, populate: bool = False) -> Bytes:
    """Bytes of a file in memory from `begin` on, which is a multiple of the page size; zeros at first. Unmapped when
    the array is freed. Raises UserError, which says `who` needs them, if there is too little memory."""
    flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if populate else 0)
    try:
        # It only grows the file: another rank may have come further.
        os.posix_fallocate(fd, begin, num_bytes)
        return np.frombuffer(mmap.mmap(fd, num_bytes, flags=flags, offset=begin), np.uint8)
    except OSError as error:
        raise UserError(f"{who} can't share {begin + num_bytes} bytes of memory: {error.strerror}") from error
