"""The heaps of a stage's process: Python's, and the C library's, which native libraries use."""

import ctypes
import gc

M_MMAP_THRESHOLD = -3
"""Of mallopt(3)."""
LARGE_BYTES = 512 * 1024


NEW_OBJECTS = 5000
"""A garbage collection looks at new objects when there are this many more. With Python's 700, a gateway that serves
small requests collects once for every few of them, and finds nothing: that takes a twentieth of its time."""


def freeze() -> None:
    """Keep all objects that exist now out of later garbage collections: they are never freed. For a process that has
    just loaded what it needs."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])


def trim() -> bool:
    """Give freed memory of the C library's heap back to the kernel. Takes about 0.1 ms per MB that is free, in which
    other Python threads run. Returns whether there was some; false without glibc, whose allocator keeps more than
    others do."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return give_back is not None and bool(give_back(0))


def unmap_large_blocks() -> bool:
    """Have each block of LARGE_BYTES or more mapped on its own from now on, so that the kernel gets it back as soon as
    it is freed. For processes whose large blocks are bodies and prompts that come and go: by default, glibc raises the
    size from which it does so to 32 MiB as it meets such blocks, and then small ones that stay keep the gaps between
    them. Returns whether it is so; false without glibc."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    return set_option is not None and bool(set_option(M_MMAP_THRESHOLD, LARGE_BYTES))
