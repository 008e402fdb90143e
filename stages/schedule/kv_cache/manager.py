"""The KV cache as sequences use it: which positions are computed when a sequence starts, which blocks hold them, and
which copies bring the rest.

    prefix cache      shared blocks that already hold the sequence's first ids
    fork              the prompt's blocks of a running sequence of the same request. All are shared except the block in
                      which the prompt ends: both sequences write to it, so the new one gets a copy (copy on write)
    swap space        what the sequence had computed before it was preempted, copied back; or blocks that were in the
                      prefix cache (offload.py)

A shared block is always full: nothing writes to it again.
"""

from bisect import bisect_left
from collections.abc import Callable

import msgspec
import numpy as np

from pipeline.stages.schedule.arrays import Int64s
from pipeline.stages.schedule.kv_cache import prefix
from pipeline.stages.schedule.kv_cache.block_pool import BlockPool
from pipeline.stages.schedule.kv_cache.offload import KVOffload
from pipeline.stages.schedule.kv_cache.offload_index import OffloadIndex
from pipeline.stages.schedule.kv_cache.swap import BlockCopies, Swapped
from pipeline.stages.schedule.policies.policy import may_start
from pipeline.stages.schedule.request import Sequence
from pipeline.stages.schedule.rows import NEVER_REGISTERED, RowTracker
from pipeline.stages.schedule.scheduler_config import SchedulerConfig


class ComputedPrefix(msgspec.Struct):
    """The part of a sequence that need not be computed when it starts."""

    blocks: list[int]
    """Shared blocks, the first of the sequence's block table."""
    num_computed: int
    """Positions whose KV is there, or will be after the step's copies."""
    num_new_blocks: int
    """Blocks to allocate after the shared ones."""
    offloaded: list[int] = []
    """Swap blocks that hold what follows the shared blocks."""
    fork_of: int = -1
    """The row that the sequence forks from."""


class KVCacheManager:
    """Owns the block pool, swap space and the copies of the next step."""

    def __init__(
        self,
        config: SchedulerConfig,
        rows: RowTracker,
        index_memory: memoryview | None = None,
        observe: Callable[[bytes], bytes] = bytes,
    ) -> None:
        """`index_memory` holds the index of swap space, perhaps with entries of the process before; `observe` records
        these for a replay."""
        self.pool = BlockPool(config.num_blocks)
        self.swap = BlockPool(config.num_swap_blocks)
        self.copies = BlockCopies(config.num_blocks)
        is_on = config.kv_offload and config.prefix_caching
        index = OffloadIndex(index_memory, config.num_swap_blocks)
        self.offload = KVOffload(rows, self.swap, self.copies, index, config.block_size, is_on=is_on)
        if config.num_swap_blocks:
            self.offload.adopt(observe(index.entries()))
        self._rows = rows
        self._block_size = config.block_size
        self._prefix_caching = config.prefix_caching
        self.num_blocks_swapped_out = self.num_blocks_swapped_in = self.num_blocks_restored = self.num_forks = 0
        """Since start."""

    def num_blocks_for(self, num_ids: int) -> int:
        return -(-num_ids // self._block_size)

    # ------------------------------------------------------------------------------------------------- allocate

    def allocate(self, sequence: Sequence, num_running: int, step_id: int) -> tuple[ComputedPrefix, list[int]] | None:
        """Give a sequence the blocks of all its ids, and list the copies that fill them. Returns None if there are too
        few blocks beside `num_running` rows. `step_id` is the step that is being planned."""
        pool = self.pool
        found = self._find_computed(sequence)
        num_unheld = sum(map(pool.is_cached, found.blocks))
        if not may_start(pool.num_available, found.num_new_blocks + num_unheld, num_running):
            return None
        for block in found.blocks:
            pool.hold(block)
        blocks = found.blocks + [pool.take() for _ in range(found.num_new_blocks)]
        if found.fork_of >= 0:
            self._copy_fork(found, blocks)
        elif sequence.swapped is not None:
            self._swap_in(sequence.swapped, len(found.blocks), blocks, step_id)
            sequence.swapped = None
        elif found.offloaded:
            self._restore(found, blocks, step_id)
        return found, blocks

    def demand_of(self, sequence: Sequence) -> "BlockDemand":
        """The blocks that a sequence needs to start."""
        found = self._find_computed(sequence)
        num_needed = found.num_new_blocks + sum(map(self.pool.is_cached, found.blocks))
        return BlockDemand(self.pool, num_needed, set(found.blocks))

    def num_cached_blocks(self, sequence: Sequence) -> int:
        """About how many blocks of a sequence's ids are in the prefix cache. Tails are evicted first, so a binary
        search finds the end of the cached part, unless another request has kept a tail alive."""
        if not self._prefix_caching or sequence.request.needs_full_prefill:
            return 0
        find = self.pool.find
        return bisect_left(self._keys_of(sequence), 1, key=lambda key: 0 if find(key) is not None else 1)

    def _find_computed(self, sequence: Sequence) -> ComputedPrefix:
        hits = self._cached_blocks(sequence)
        return self._find_fork(sequence, hits) or self._find_cached(sequence, hits)

    def _find_cached(self, sequence: Sequence, hits: list[int]) -> ComputedPrefix:
        """In the prefix cache, then in swap space."""
        num_new_blocks = self.num_blocks_for(len(sequence.ids)) - len(hits)
        if sequence.swapped is not None:
            num_computed = max(len(hits) * self._block_size, sequence.swapped.num_computed)
            return ComputedPrefix(hits, num_computed, num_new_blocks)
        offloaded = self._offloaded_blocks(sequence, len(hits))
        num_computed = (len(hits) + len(offloaded)) * self._block_size
        return ComputedPrefix(hits, num_computed, num_new_blocks, offloaded)

    def _find_fork(self, sequence: Sequence, hits: list[int]) -> ComputedPrefix | None:
        """In a running sequence of the same request, if that has more than the prefix cache."""
        request, rows = sequence.request, self._rows
        if request.n == 1 or sequence.swapped is not None:
            return None
        num_prompt = len(request.prompt)
        running = [other.row for other in request.open_sequences.values() if other.row >= 0]
        ready = [row for row in running if rows.ahead[row] >= num_prompt]
        num_computed = min(num_prompt, len(sequence.ids) - 1)
        if not ready or len(hits) * self._block_size >= num_computed:
            return None
        num_full = num_computed // self._block_size
        blocks: list[int] = rows.table[ready[0], :num_full].tolist()
        num_new_blocks = self.num_blocks_for(len(sequence.ids)) - num_full
        return ComputedPrefix(blocks, num_computed, num_new_blocks, fork_of=ready[0])

    def _copy_fork(self, found: ComputedPrefix, blocks: list[int]) -> None:
        self.num_forks += 1
        num_shared = len(found.blocks)
        if found.num_computed > num_shared * self._block_size:
            source = int(self._rows.table[found.fork_of, num_shared])
            self.copies.fork(source, blocks[num_shared])

    # ----------------------------------------------------------------------------------------------------- swap

    def swap_out(self, row: int, num_kept: int, step_id: int) -> Swapped:
        """List the copies of a row's first `num_kept` positions to swap space, which `step_id` makes. Blocks that are
        there already are kept. The caller has checked that there is room."""
        sequence = self._rows.sequences[row]
        assert sequence is not None
        num_blocks = self.num_blocks_for(num_kept)
        blocks = sequence.offloaded[:num_blocks]
        for block in blocks:
            self.swap.hold(block)
        taken = [self.offload.take_block() for _ in range(num_blocks - len(blocks))]
        self.copies.out(self._rows.table[row, len(blocks) : num_blocks].tolist(), taken)
        self.num_blocks_swapped_out += len(taken)
        return Swapped(blocks + taken, num_kept, step_id)

    def _swap_in(self, swapped: Swapped, num_shared: int, blocks: list[int], step_id: int) -> None:
        """List the copies of what is no longer in the prefix cache. The swap blocks are free once the step has run."""
        sources = swapped.blocks[num_shared:]
        self.copies.back(sources, blocks[num_shared : num_shared + len(sources)])
        self.num_blocks_swapped_in += len(sources)
        self.swap.retire(swapped.blocks[::-1], step_id)

    def _restore(self, found: ComputedPrefix, blocks: list[int], step_id: int) -> None:
        """List the copies of what was found in swap space, and hold it there until they are made."""
        num_shared, num_restored = len(found.blocks), len(found.offloaded)
        for block in found.offloaded:
            self.swap.hold(block)
        self.copies.back(found.offloaded, blocks[num_shared : num_shared + num_restored])
        self.num_blocks_restored += num_restored
        self.swap.retire(found.offloaded[::-1], step_id)

    # -------------------------------------------------------------------------------------------------- release

    def release(self, blocks: list[int], step_id: int | None) -> None:
        """Release a row's blocks, the tail first, once `step_id`, the last step that names them, is settled. With None,
        release them at once."""
        self.pool.release_after(blocks, step_id)

    def release_swapped(self, swapped: Swapped, step_id: int | None) -> None:
        """Release the swap blocks of a sequence that ended in swap space. Copies into them may still be in flight, but
        run before any later ones."""
        self.swap.release_after(swapped.blocks[::-1], step_id)

    def settle(self, step_id: int) -> None:
        """Release what was retired until this step."""
        self.pool.settle(step_id)
        self.swap.settle(step_id)
        self.offload.settle(step_id)

    def executor_lost(self, *, keeps_swap: bool) -> None:
        """The executor has died with all KV blocks. No row holds any, and what is in swap space stays, unless its
        successor can't use that."""
        self.copies.take()
        self.offload.executor_lost()
        if not keeps_swap:
            self.offload.reset()
        self.pool.settle_all()
        self.swap.settle_all()
        self.pool.forget_all()

    # --------------------------------------------------------------------------------------------- prefix cache

    def register(self, running: Int64s) -> None:
        """Add full blocks of these rows to the prefix cache: those whose ids are settled and whose KV is planned. A
        later step, or a later row of this step, may read them: steps run in order, and a step writes KV before it
        reads it."""
        if not self._prefix_caching:
            return
        rows = self._rows
        num_full = np.minimum(rows.known[running], rows.planned[running]) // self._block_size
        fresh = num_full > rows.num_registered[running]
        if np.count_nonzero(fresh):
            for place in fresh.nonzero()[0].tolist():
                self._register_row(int(running[place]), int(num_full[place]))

    def register_last(self, row: int) -> None:
        """Add the full blocks of a row that ends or is preempted. The KV of its last id may not be computed: the
        sequence may have stopped there."""
        num_full = int(min(self._rows.known[row] - 1, self._rows.planned[row])) // self._block_size
        if self._prefix_caching and num_full > self._rows.num_registered[row]:
            self._register_row(row, num_full)

    def reset_prefix_cache(self) -> int:
        """Empty the prefix cache, and keep what running rows compute out of it. Returns how many blocks it held."""
        self._rows.num_registered[self._rows.order] = NEVER_REGISTERED
        self.offload.reset()
        return self.pool.forget_all()

    def _register_row(self, row: int, num_full: int) -> None:
        rows = self._rows
        sequence = rows.sequences[row]
        assert sequence is not None
        prefix.extend(sequence.keys, rows.ids[row], num_full, self._block_size, sequence.request.root)
        for place in range(int(rows.num_registered[row]), num_full):
            self.pool.register(int(rows.table[row, place]), sequence.keys[place])
        rows.num_registered[row] = num_full

    def _keys_of(self, sequence: Sequence) -> list[bytes]:
        """Keys of the full blocks that a sequence without a row may find. Its last id is always computed: the next id
        is sampled from its logits."""
        request, num_blocks = sequence.request, (len(sequence.ids) - 1) // self._block_size
        if request.n > 1 and not sequence.keys:  # hash the prompt once for all parallel samples
            prefix.extend(
                request.keys, request.prompt, len(request.prompt) // self._block_size, self._block_size, request.root
            )
            sequence.keys = list(request.keys)
        prefix.extend(sequence.keys, sequence.ids, num_blocks, self._block_size, sequence.request.root)
        return sequence.keys[:num_blocks]

    def _cached_blocks(self, sequence: Sequence) -> list[int]:
        """The longest run of cached blocks that hold a sequence's first ids."""
        if not self._prefix_caching or sequence.request.needs_full_prefill:
            return []
        hits: list[int] = []
        for key in self._keys_of(sequence):
            block = self.pool.find(key)
            if block is None:
                break
            hits.append(block)
        return hits

    def _offloaded_blocks(self, sequence: Sequence, num_hits: int) -> list[int]:
        """The swap blocks that hold what follows a sequence's first `num_hits` blocks."""
        if not self._prefix_caching or sequence.request.needs_full_prefill:
            return []
        return self.offload.find(self._keys_of(sequence)[num_hits:])

    def check(self, swapped: list[Swapped]) -> None:
        """Assert every invariant; for tests. `swapped` are all sequences in swap space."""
        rows, pool = self._rows, self.pool
        pool.check()
        self._check_swap(swapped)
        num_held = 0
        for row in rows.order.tolist():
            assert rows.num_blocks[row] * self._block_size >= rows.planned[row], f"row {row} lacks a block"
            table = rows.table[row, : rows.num_blocks[row]].tolist()
            assert len(set(table)) == len(table), f"row {row} has a block twice"
            num_held += len(table)
        assert num_held + pool.num_retired == sum(map(pool.num_refs, range(pool.num_total))), (
            "a reference has no holder"
        )

    def _check_swap(self, swapped: list[Swapped]) -> None:
        self.swap.check()
        num_held = sum(len(one.blocks) for one in swapped)
        for row in self._rows.order.tolist():
            sequence = self._rows.sequences[row]
            assert sequence is not None and len(sequence.offloaded) == self._rows.num_offloaded[row]
            num_held += len(sequence.offloaded)
        assert num_held + self.swap.num_retired == sum(map(self.swap.num_refs, range(self.swap.num_total))), (
            "a reference to a swap block has no holder"
        )


class BlockDemand:
    """How many blocks some sequences need to start, and how many they would have if some rows were preempted, once the
    steps in flight are settled."""

    def __init__(self, pool: BlockPool, num_needed: int, shared: set[int]) -> None:
        """`shared` are blocks that the sequence will hold itself: they never become available."""
        self._pool = pool
        self._num_needed = num_needed
        self._shared = shared
        self._num_available = pool.num_available
        self._num_released: dict[int, int] = {}
        for blocks in pool.retired():
            self.release(blocks)

    def release(self, blocks: list[int]) -> None:
        """Assume that one reference of each of these blocks is released."""
        for block in blocks:
            count = self._num_released[block] = self._num_released.get(block, 0) + 1
            if count == self._pool.num_refs(block) and block not in self._shared:
                self._num_available += 1

    def add(self, num_blocks: int) -> None:
        """Add the blocks that another sequence needs."""
        self._num_needed += num_blocks

    def is_met(self, num_running: int) -> bool:
        """Whether the sequences could start beside `num_running` rows."""
        return may_start(self._num_available, self._num_needed, num_running)
