"""The heaps of a stage's process: Python's, and the C library's, which native libraries use."""

import ctypes
import gc


def freeze() -> None:
    """Keep all objects that exist now out of later garbage collections: they are never freed. For a process that has
    just loaded what it needs."""
    gc.collect()
    gc.freeze()


def trim() -> bool:
    """Give freed memory of the C library's heap back to the kernel. Takes about 0.1 ms per MB that is free, in which
    other Python threads run. Returns whether there was some; false without glibc, whose allocator keeps more than
    others do."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return give_back is not None and bool(give_back(0))
