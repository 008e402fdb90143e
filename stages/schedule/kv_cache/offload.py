"""Copies full KV blocks to swap space as soon as they are computed (write-through), so that swap space is a second
level of the prefix cache.

A block there has the same key as in the KV cache (prefix.py). It survives when memory is short and the KV cache evicts
it, and when the executor or this process dies: swap space and the index of it (block_index.py) belong to the
supervisor. What starts later and has the same ids copies it back instead of computing it.

    KV cache    registered in plan N, computed until step N
                    │
                    └──► copied by step N + 1, before it computes ──► found by its key, from plan N + 1 on

Running sequences hold their blocks in swap space too, so only those of other sequences are evicted. If there is no
room, the rest of a sequence is not copied. SGLang's hierarchical cache has the same write-through policy, for eviction.
"""

import numpy as np

from pipeline.runtime.model.kv_groups import FULL, KVGroup
from pipeline.stages.schedule.kv_cache import prefix
from pipeline.stages.schedule.kv_cache.block_pool import BlockPool
from pipeline.stages.schedule.kv_cache.swap import BlockCopies
from pipeline.stages.schedule.request import Sequence
from pipeline.stages.schedule.rows import NEVER_REGISTERED, RowTracker

MAX_COPIES = 32
"""Blocks of a KV group that one step copies at most: a long prompt must not delay the step after it. Later steps copy
the rest."""


class KVOffload:
    """Decides what is copied to swap space, and finds it there. Swap space is shared with swapped sequences."""

    def __init__(
        self,
        rows: RowTracker,
        swap: BlockPool,
        copies: BlockCopies,
        block_size: int,
        groups: tuple[KVGroup, ...] = (FULL,),
        *,
        is_on: bool,
    ) -> None:
        """If it is not on, nothing is copied. If it is, there is swap space."""
        self._rows = rows
        self._swap = swap
        self._copies = copies
        self._block_size = block_size
        self._groups = range(len(groups))
        self._is_on = is_on
        self.num_blocks_offloaded = 0
        """Since start."""

    def copy_new_blocks(self, step_id: int) -> None:
        """List the copies that `step_id` makes: of the registered blocks of all rows, as far as they are not in swap
        space. The plan of `step_id` must not have changed any row yet: then all registered blocks are computed before
        it."""
        if not self._is_on:
            return
        rows = self._rows
        order = rows.order
        registered = rows.num_registered[order]
        lacking = (registered > rows.num_offloaded[order]) & (registered < NEVER_REGISTERED)
        if not np.count_nonzero(lacking):
            return
        num_left = MAX_COPIES * len(self._groups)
        for row in order[lacking].tolist():
            num_left -= self._offload(row, num_left, step_id)
            if num_left < len(self._groups):
                break

    def _offload(self, row: int, max_copies: int, step_id: int) -> int:
        """Hold the swap blocks of a row's registered blocks, and copy those that are not there. Returns the number of
        copies."""
        rows, swap = self._rows, self._swap
        sequence = rows.sequences[row]
        assert sequence is not None
        sources: list[int] = []
        targets: list[int] = []
        num_registered = int(rows.num_registered[row])
        # The keys of blocks that a fork shares may not be computed yet.
        sequence.extend_keys(rows.ids[row], num_registered, self._block_size)
        if not sequence.offloaded:
            sequence.offloaded = [[] for _ in self._groups]
        index = int(rows.num_offloaded[row])
        firsts = rows.block_firsts[:, row].tolist()
        while index < num_registered:
            keys = [
                (group, prefix.group_key(sequence.keys[index], group))
                for group in self._groups
                if index >= firsts[group]
            ]
            found = [swap.find(key) for _, key in keys]
            there = [block for block in found if block is not None]
            for block in there:
                swap.hold(block)
            num_lacking = len(found) - len(there)
            if num_lacking and (len(sources) + num_lacking > max_copies or num_lacking > swap.num_available):
                swap.release(there)
                break
            for (group, key), known in zip(keys, found, strict=True):
                if known is not None:
                    sequence.offloaded[group].append(known)
                    continue
                taken = swap.take()
                swap.register(taken, key, step_id)
                sources.append(int(rows.tables[group, row, index]))
                targets.append(taken)
                sequence.offloaded[group].append(taken)
            index += 1
        rows.num_offloaded[row] = index
        self._copies.out(sources, targets)
        self.num_blocks_offloaded += len(sources)
        return len(sources)

    def release(self, sequence: Sequence) -> None:
        """Release the swap blocks of a sequence that leaves its row. They can be found until they are evicted."""
        for blocks in sequence.offloaded:
            self._swap.release(reversed(blocks))
        sequence.offloaded = []

    def release_passed(self, sequence: Sequence, group: int, num_blocks: int) -> None:
        """Release the swap blocks of a row's first `num_blocks` blocks, which it no longer needs in this KV group."""
        if sequence.offloaded:
            blocks = sequence.offloaded[group]
            self._swap.release(blocks[:num_blocks])
            del blocks[:num_blocks]

    @property
    def is_on(self) -> bool:
        """Whether blocks are copied to swap space and found there."""
        return self._is_on
