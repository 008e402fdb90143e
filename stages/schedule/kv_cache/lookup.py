"""Finds the blocks that a sequence can reuse, in the prefix cache and in swap space. Changes nothing.

A sequence continues behind a prefix of h blocks if each KV group has what the next position reads: all h blocks with
full attention, and with a window the last ones:

    full attention     0 1 2 3 4 5 6 7          all blocks before the prefix's end
    window                       5 6 7          those that the window still reaches
                                      ^ h = 8

The longest h is that on which all groups agree. The blocks of layers with a window leave the row, and may be evicted,
while the sequence runs, so a prefix may be there at some lengths and not at shorter ones.
"""

from collections.abc import Iterable

import msgspec

from pipeline.runtime.model.kv_groups import KVGroup
from pipeline.stages.schedule.kv_cache.block_pool import BlockPool
from pipeline.stages.schedule.kv_cache.prefix import group_key
from pipeline.stages.schedule.kv_cache.swap import Swapped


class FoundBlocks(msgspec.Struct):
    """Blocks of one KV group that hold a part of a sequence."""

    first: int
    """The place of the first one."""
    blocks: list[int]
    """Blocks of the KV cache, which the sequence will share; ~b is block b of swap space, to be copied back."""

    @property
    def num_shared(self) -> int:
        """Places, from 0 on, before the first block that is copied back."""
        return self.first + next((i for i, block in enumerate(self.blocks) if block < 0), len(self.blocks))


class PrefixLookup:
    """Reads the block pools of the KV cache and of swap space."""

    def __init__(self, pool: BlockPool, swap: BlockPool, groups: tuple[KVGroup, ...], block_size: int) -> None:
        self._pool = pool
        self._swap = swap
        self._groups = groups
        self._block_size = block_size
        self._by_window: dict[int, list[int]] = {}
        """Groups that keep the same positions."""
        for index, group in enumerate(groups):
            self._by_window.setdefault(group.window, []).append(index)

    def longest(self, keys: list[bytes], *, with_swap: bool) -> tuple[int, list[FoundBlocks]]:
        """The longest prefix of the blocks with these keys that all groups can continue behind: its number of blocks,
        and for each group those that it needs."""
        num_blocks, found = len(keys), [FoundBlocks(0, []) for _ in self._groups]
        for index in self._by_window.get(0, ()):
            found[index].blocks = blocks = self._run(keys, index, with_swap=with_swap)
            num_blocks = min(num_blocks, len(blocks))
        windows = [window for window in self._by_window if window]
        agreed = 0
        while num_blocks and agreed < len(windows):  # until no window shortens it
            agreed = 0
            for window in windows:
                fitting = self._fitting(keys, num_blocks, self._by_window[window], with_swap=with_swap)
                agreed = agreed + 1 if fitting == num_blocks else 0
                num_blocks = fitting
        for index, group in enumerate(self._groups):
            if group.window and num_blocks:
                first = group.first_block(num_blocks * self._block_size, self._block_size)
                of_window = (
                    self._at(keys, index, block_index, with_swap=with_swap) for block_index in range(first, num_blocks)
                )
                found[index] = FoundBlocks(first, [block for block in of_window if block is not None])
                assert found[index].first + len(found[index].blocks) == num_blocks
            else:
                del found[index].blocks[num_blocks:]
        return num_blocks, found

    def swapped(self, keys: list[bytes], swapped: Swapped) -> list[FoundBlocks]:
        """The blocks of a sequence that was swapped out: those in the prefix cache are shared."""
        num_full = swapped.num_computed // self._block_size
        found: list[FoundBlocks] = []
        for index, table in enumerate(swapped.tables):
            shared: list[int] = []
            for block_index in range(table.first, min(num_full, len(keys))):
                block = self._pool.find(group_key(keys[block_index], index))
                if block is None:
                    break
                shared.append(block)
            found.append(FoundBlocks(table.first, shared + [~block for block in table.blocks[len(shared) :]]))
        return found

    def _run(self, keys: list[bytes], index: int, *, with_swap: bool) -> list[int]:
        """The first blocks of a group, up to the first that is not there: in the prefix cache, then in swap space."""
        blocks = list(_until_missing(self._pool, keys, index))
        if with_swap:
            blocks += [~block for block in _until_missing(self._swap, keys[len(blocks) :], index)]
        return blocks

    def _fitting(self, keys: list[bytes], most: int, indices: list[int], *, with_swap: bool) -> int:
        """The longest prefix of at most `most` blocks whose end these groups, of one window, have."""
        group = self._groups[indices[0]]
        end, block_index = most, most - 1
        first = group.first_block(end * self._block_size, self._block_size)
        while end and block_index >= first:
            if all(self._at(keys, index, block_index, with_swap=with_swap) is not None for index in indices):
                block_index -= 1
            else:
                end, block_index = block_index, block_index - 1
                first = group.first_block(end * self._block_size, self._block_size)
        return end

    def _at(self, keys: list[bytes], index: int, block_index: int, *, with_swap: bool) -> int | None:
        """A block of a group, as in `FoundBlocks.blocks`; None if it is not there."""
        key = group_key(keys[block_index], index)
        block = self._pool.find(key)
        if block is not None or not with_swap:
            return block
        swap_block = self._swap.find(key)
        return None if swap_block is None else ~swap_block


def _until_missing(pool: BlockPool, keys: list[bytes], index: int) -> Iterable[int]:
    for key in keys:
        block = pool.find(group_key(key, index))
        if block is None:
            return
        yield block
