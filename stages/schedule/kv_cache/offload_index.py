"""The keys of the blocks in swap space, in shared memory of the supervisor: the successor of a dead process finds these
blocks too.

    16 bytes for each swap block: the key of its content; zeros: not known

A key is stored once the step that copies the block has run, and cleared before the block gets other content. So
whenever this process dies, each key in the index is right. A half-written key equals no key that anyone looks for.
"""

import struct
from collections.abc import Iterator

import numpy as np

from pipeline.stages.schedule.kv_cache.prefix import KEY_BYTES

ENTRY = struct.Struct(f"<q{KEY_BYTES}s")


class OffloadIndex:
    """Without memory, or for blocks beyond its end, it stores nothing."""

    def __init__(self, memory: memoryview | None, num_blocks: int) -> None:
        """`memory` is writable; `num_blocks` is the number of swap blocks."""
        data = np.frombuffer(bytearray() if memory is None else memory, np.uint8)
        num_entries = min(num_blocks, len(data) // KEY_BYTES)
        self._keys = data[: num_entries * KEY_BYTES].reshape(num_entries, KEY_BYTES)

    def set(self, block: int, key: bytes) -> None:
        """The block holds the content of this key."""
        if block < len(self._keys):
            self._keys[block] = np.frombuffer(key, np.uint8)

    def clear(self, block: int) -> None:
        """The block gets other content."""
        if block < len(self._keys):
            self._keys[block] = 0

    def clear_all(self) -> None:
        """Clear every key. Touches only those that are set: memory that was never written stays unused."""
        self._keys[self._keys.any(axis=1)] = 0

    def entries(self) -> bytes:
        """All keys with their blocks, packed as `ENTRY`."""
        blocks = np.flatnonzero(self._keys.any(axis=1)).tolist()
        return b"".join(ENTRY.pack(block, self._keys[block].tobytes()) for block in blocks)


def unpacked(entries: bytes) -> Iterator[tuple[int, bytes]]:
    """Blocks and keys from what `entries` returned."""
    return ENTRY.iter_unpack(entries)
