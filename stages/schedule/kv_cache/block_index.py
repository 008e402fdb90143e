"""The keys of the blocks in the KV cache or in swap space, in shared memory of the supervisor: the successor of a dead
process finds these blocks too.

    8 bytes              the owner of the blocks; see `BlockIndex`
    16 bytes per block   the key of its content; zeros: not known. With several KV groups 17: the last one is the group.

A key is stored once the step that computes or copies the block has run, and cleared before the block gets other
content. So whenever this process dies, each key in the index is right. A half-written key equals no key that anyone
looks for.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from pipeline.stages.schedule.kv_cache.prefix import KEY_BYTES

HEADER_BYTES = 8


@dataclass(frozen=True, slots=True)
class IndexMemory:
    """Where an index is."""

    memory: memoryview | None = None
    """Writable, perhaps with entries of the process before."""
    observe: Callable[[bytes], bytes] = bytes
    """Records these for a replay."""


NO_MEMORY = IndexMemory()


class BlockIndex:
    """Without memory, or for blocks beyond its end, it stores nothing."""

    def __init__(
        self,
        memory: memoryview | None,
        num_blocks: int,
        *,
        has_groups: bool = False,
        owner: int = 0,
        keeps: bool = True,
    ) -> None:
        """`memory` is writable; `num_blocks` is the number of blocks. Keys that were stored for another owner, such as
        an executor that has died with its KV cache, are cleared, and all of them without `keeps`."""
        data = np.frombuffer(bytearray(HEADER_BYTES) if memory is None else memory, np.uint8)
        width = KEY_BYTES + has_groups
        num_entries = min(num_blocks, (len(data) - HEADER_BYTES) // width)
        self._owner = data[:HEADER_BYTES].view(np.int64)
        self._keys = data[HEADER_BYTES : HEADER_BYTES + num_entries * width].reshape(num_entries, width)
        if self._owner[0] != owner or not keeps:
            self.clear_all(owner)

    def set(self, block: int, key: bytes) -> None:
        """The block holds the content of this key."""
        if block < len(self._keys):
            self._keys[block, : len(key)] = np.frombuffer(key, np.uint8)
            self._keys[block, len(key) :] = 0

    def clear(self, block: int) -> None:
        """The block gets other content."""
        if block < len(self._keys):
            self._keys[block] = 0

    def clear_all(self, owner: int | None = None) -> None:
        """Clear every key. Touches only those that are set: memory that was never written stays unused. From now on the
        blocks belong to `owner`, if that is given."""
        self._keys[self._keys.any(axis=1)] = 0
        if owner is not None:
            self._owner[0] = owner

    def give_to(self, owner: int) -> None:
        """The blocks belong to `owner` from now on, and the keys are right for it."""
        self._owner[0] = owner

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
