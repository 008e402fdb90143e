"""The keys of the blocks in swap space, in shared memory of the supervisor: the successor of a dead process finds these
blocks too.

    16 bytes for each swap block: the key of its content; zeros: not known. With several KV groups 17: the last one is
    the group.

A key is stored once the step that copies the block has run, and cleared before the block gets other content. So
whenever this process dies, each key in the index is right. A half-written key equals no key that anyone looks for.
"""

from collections.abc import Iterator

import numpy as np

from pipeline.stages.schedule.kv_cache.prefix import KEY_BYTES


class OffloadIndex:
    """Without memory, or for blocks beyond its end, it stores nothing."""

    def __init__(self, memory: memoryview | None, num_blocks: int, *, has_groups: bool = False) -> None:
        """`memory` is writable; `num_blocks` is the number of swap blocks."""
        data = np.frombuffer(bytearray() if memory is None else memory, np.uint8)
        width = KEY_BYTES + has_groups
        num_entries = min(num_blocks, len(data) // width)
        self._keys = data[: num_entries * width].reshape(num_entries, width)

    def set(self, block: int, key: bytes) -> None:
        """The block holds the content of this key."""
        if block < len(self._keys):
            self._keys[block, : len(key)] = np.frombuffer(key, np.uint8)
            self._keys[block, len(key) :] = 0

    def clear(self, block: int) -> None:
        """The block gets other content."""
        if block < len(self._keys):
            self._keys[block] = 0

    def clear_all(self) -> None:
        """Clear every key. Touches only those that are set: memory that was never written stays unused."""
        self._keys[self._keys.any(axis=1)] = 0

    def entries(self) -> bytes:
        """All keys with their blocks, 8 bytes each."""
        blocks = np.flatnonzero(self._keys.any(axis=1)).tolist()
        return b"".join(block.to_bytes(8, "little") + self._keys[block].tobytes() for block in blocks)


def unpacked(entries: bytes, *, has_groups: bool = False) -> Iterator[tuple[int, bytes]]:
    """Blocks and keys from what `entries` returned."""
    width = 8 + KEY_BYTES + has_groups
    for at in range(0, len(entries), width):
        key = entries[at + 8 : at + width]
        is_first = has_groups and not key[-1]  # the first group's keys have no tag
        yield int.from_bytes(entries[at : at + 8], "little"), key[:-1] if is_first else key
