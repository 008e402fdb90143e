"""The KV cache as sequences use it: which positions are computed when a sequence starts, which blocks hold them, and
which copies bring the rest.

    prefix cache      shared blocks that already hold the sequence's first ids
    fork              the prompt's blocks of a running sequence of the same request. All are shared except the block in
                      which the prompt ends: both sequences write to it, so the new one gets a copy (copy on write)
    tail              the last block, filled in part, of a sequence of the process before (partial_blocks.py)
    swap space        what the sequence had computed before it was preempted, copied back; or blocks that were in the
                      prefix cache (offload.py)

A shared block is always full: nothing writes to it again.

A sequence has a block table in each KV group (pipeline/runtime/model/kv_groups.py). With full attention it has blocks
for all its ids from the start. With a window, it has those that its next positions read, and those that a step may
write:

                 released        first .......... planned ...... end
                 or never held   window           largest chunk
"""

import msgspec
import numpy as np

from pipeline.runtime.model import kv_groups
from pipeline.stages.schedule.arrays import Int64s
from pipeline.stages.schedule.kv_cache import prefix
from pipeline.stages.schedule.kv_cache.block_demand import BlockDemand
from pipeline.stages.schedule.kv_cache.block_index import NO_MEMORY, BlockIndex, IndexMemory, unpacked
from pipeline.stages.schedule.kv_cache.block_pool import BlockPool
from pipeline.stages.schedule.kv_cache.computed_prefix import ComputedPrefix, ComputedPrefixes
from pipeline.stages.schedule.kv_cache.lookup import PrefixLookup
from pipeline.stages.schedule.kv_cache.offload import KVOffload
from pipeline.stages.schedule.kv_cache.partial_blocks import PartialBlocks
from pipeline.stages.schedule.kv_cache.states.pools import StatePools
from pipeline.stages.schedule.kv_cache.states.slots import StateSlots
from pipeline.stages.schedule.kv_cache.swap import BlockCopies, Swapped
from pipeline.stages.schedule.kv_cache.tables import BlockTable
from pipeline.stages.schedule.kv_cache.windows import WindowBlocks
from pipeline.stages.schedule.policies.policy import may_start
from pipeline.stages.schedule.request import Sequence
from pipeline.stages.schedule.rows import NEVER_REGISTERED, RowTracker
from pipeline.stages.schedule.scheduler_config import SchedulerConfig


class ExecutorLoss(msgspec.Struct, frozen=True):
    """The executor has died."""

    successor: int
    """The incarnation of its successor."""
    keeps_swap: bool = True
    """Whether the successor can use what is in swap space."""
    crash_counts: dict[int, int] = {}
    """As in `Launch`, the newest."""


class KVCacheManager:
    """Owns the block pool, swap space and the copies of the next step."""

    def __init__(
        self,
        config: SchedulerConfig,
        rows: RowTracker,
        kv_index: IndexMemory = NO_MEMORY,
        swap_index: IndexMemory = NO_MEMORY,
        executor: int = 1,
        state_pools: StatePools | None = None,
    ) -> None:
        """The indices are those of the KV cache and of swap space. Without `state_pools`, the slots that there are have
        no memory. `executor` is the incarnation of the executor's
        process, which owns the KV cache."""
        self.groups = groups = config.kv_groups
        has_groups, is_offloading = len(groups) > 1, config.offloads
        index = BlockIndex(
            kv_index.memory, config.num_blocks, has_groups=has_groups, owner=executor, keeps=config.prefix_caching
        )
        self.pool = BlockPool(config.num_blocks, index)
        if config.prefix_caching:
            self.pool.adopt(dict(unpacked(kv_index.observe(index.entries()), has_groups=has_groups)))
        index = BlockIndex(swap_index.memory, config.num_swap_blocks, has_groups=has_groups, keeps=is_offloading)
        self.swap = BlockPool(config.num_swap_blocks, index)
        self.copies = BlockCopies(config.num_blocks)
        self.windows = WindowBlocks(config, rows, self.pool)
        self.offload = KVOffload(rows, self.swap, self.copies, config.block_size, groups, is_on=is_offloading)
        if self.offload.is_on:
            self.swap.adopt(dict(unpacked(swap_index.observe(index.entries()), has_groups=has_groups)))
        self._planned_step = 0
        """The last step that was planned, or is being planned."""
        pools = state_pools or StatePools(config)
        self.states = StateSlots(config, rows, pools)
        self._partial_blocks = PartialBlocks(rows, self.pool, config.block_size, len(groups), pools)
        lookup = PrefixLookup(self.pool, self.swap, groups, config.block_size)
        self.prefixes = ComputedPrefixes(
            config, rows, self.pool, lookup, self._partial_blocks, self.windows, self.offload, pools
        )
        self._rows = rows
        self._block_size = config.block_size
        self._max_chunk = config.max_chunk
        self._prefix_caching = config.prefix_caching
        self.num_blocks_swapped_out = self.num_blocks_swapped_in = self.num_blocks_restored = self.num_forks = 0
        """Since start."""

    def most_blocks(self, num_ids: int) -> int:
        """Blocks of all groups that a sequence of `num_ids` ids holds at most."""
        if self.windows.is_plain:
            return -(-num_ids // self._block_size)
        return kv_groups.most_blocks(self.groups, num_ids, self._max_chunk, self._block_size)

    def may_start(self, num_available: int, num_needed: int, num_running: int) -> bool:
        """Whether a sequence that needs `num_needed` blocks may start beside `num_running` others: each of these may
        soon need a block in every group."""
        return may_start(num_available, num_needed, num_running * len(self.groups))

    def begin_plan(self, step_id: int) -> None:
        """The plan of this step begins: nothing of it has changed any row yet."""
        self._planned_step = step_id
        self.offload.copy_new_blocks(step_id)
        if self.states.is_on:
            self.states.register(step_id)

    # ------------------------------------------------------------------------------------------------- allocate

    def allocate(
        self, sequence: Sequence, num_running: int, step_id: int
    ) -> tuple[ComputedPrefix, list[BlockTable]] | None:
        """Give a sequence the blocks that it needs to start, and list the copies that fill them. Returns None if there
        are too few blocks beside `num_running` rows. `step_id` is the step that is being planned."""
        pool = self.pool
        found = self.prefixes.find(sequence)
        shared = found.shared
        num_needed = found.num_new_blocks(len(shared)) + sum(map(pool.is_cached, shared))
        if not (self.may_start(pool.num_available, num_needed, num_running) and self.states.may_claim(found)):
            return None
        if self.states.is_on:
            self.states.claim(found, sequence.swapped, step_id)
        for block in shared:
            pool.hold(block)
        for block in found.tails:
            pool.claim(block)
        sources: list[int] = []
        targets: list[int] = []
        tables: list[BlockTable] = []
        for group, (part, end) in enumerate(zip(found.found, found.ends, strict=True)):
            blocks = [block if block >= 0 else pool.take() for block in part.blocks]
            blocks += found.tails[group : group + 1]
            blocks += [pool.take() for _ in range(end - part.first - len(blocks))]
            tables.append(BlockTable(part.first, blocks))
            for index, block in enumerate(part.blocks):
                if block < 0:
                    sources.append(~block)
                    targets.append(blocks[index])
        if found.fork_of >= 0:
            self._copy_fork(found, tables)
        elif sequence.swapped is not None:
            self._swap_in(sequence.swapped, sources, targets, step_id)
            sequence.swapped = None
        elif sources:
            self._restore(sources, targets, step_id)
        return found, tables

    def demand_of(self, sequence: Sequence) -> BlockDemand:
        """The blocks that a sequence needs to start."""
        found = self.prefixes.find(sequence)
        shared = found.shared
        num_needed = found.num_new_blocks(len(shared)) + sum(map(self.pool.is_cached, shared))
        return BlockDemand(self.pool, num_needed, set(shared), self.may_start)

    def _copy_fork(self, found: ComputedPrefix, tables: list[BlockTable]) -> None:
        self.num_forks += 1
        num_full = found.num_computed // self._block_size
        if found.num_computed > num_full * self._block_size:
            for group, table in enumerate(tables):
                source = int(self._rows.tables[group, found.fork_of, num_full])
                self.copies.fork(source, table.blocks[num_full - table.first])

    def fork_row(self, row: int, source: int, step_id: int | None) -> None:
        """Give a running row the content of another one that has computed as many positions: it shares the full
        blocks, and gets a copy of the last one, if it is not full, in its own. Its other blocks are released once
        `step_id` is settled. Both rows must have computed all their ids."""
        rows, sequence, other = self._rows, self._rows.sequences[row], self._rows.sequences[source]
        assert sequence is not None and other is not None
        assert (rows.block_ends[:, row] == rows.block_ends[:, source]).all(), f"rows {row} and {source} differ"
        self.num_forks += 1
        self.register(np.array([source]))
        num_full, rest = divmod(int(rows.num_computed_tokens[source]), self._block_size)
        released: list[int] = []
        for group, table in enumerate(rows.tables):
            mine, theirs = int(rows.block_firsts[group, row]), int(rows.block_firsts[group, source])
            first = max(mine, theirs)
            # Beams have most blocks in common.
            different = first + np.flatnonzero(table[row, first:num_full] != table[source, first:num_full])
            for block in (*table[source, theirs:first].tolist(), *table[source, different].tolist()):
                self.pool.hold(block)
            released += [*table[row, mine:first].tolist(), *table[row, different].tolist()][::-1]
            table[row, theirs:num_full] = table[source, theirs:num_full]
            rows.block_firsts[group, row] = theirs
            if rest:
                self.copies.fork(int(table[source, num_full]), int(table[row, num_full]))
        self.pool.release_after(released, step_id)
        if self.states.is_on:
            self.states.fork_row(row, source, step_id)
        self.offload.release(sequence)
        rows.num_offloaded[row] = 0
        rows.num_registered[row] = rows.num_registered[source]
        rows.num_tokens[row], rows.num_computed_tokens[row] = rows.num_tokens[source], rows.num_computed_tokens[source]
        sequence.keys = list(other.keys)

    # ----------------------------------------------------------------------------------------------------- swap

    def swap_out(self, row: int, num_kept: int, step_id: int) -> Swapped:
        """List the copies of a row's first `num_kept` positions to swap space, as far as later ones read them, which
        `step_id` makes. Blocks that are there already are kept. The caller has checked that there is room."""
        rows = self._rows
        sequence = rows.sequences[row]
        assert sequence is not None
        end, num_offloaded = -(-num_kept // self._block_size), int(rows.num_offloaded[row])
        tables: list[BlockTable] = []
        for index, group in enumerate(self.groups):
            first, held_from = group.first_block(num_kept, self._block_size), int(rows.block_firsts[index, row])
            assert held_from <= first, f"row {row} lacks blocks that its next position reads"
            blocks: list[int] = []
            if sequence.offloaded and num_offloaded > first:
                blocks = sequence.offloaded[index][first - held_from : end - held_from]
            for block in blocks:
                self.swap.hold(block)
            taken = [self.swap.take() for _ in range(end - first - len(blocks))]
            self.copies.out(rows.tables[index, row, first + len(blocks) : end].tolist(), taken)
            self.num_blocks_swapped_out += len(taken)
            tables.append(BlockTable(first, blocks + taken))
        return Swapped(tables, num_kept, step_id, self.states.swap_out(row))

    def num_swap_blocks(self, rows: Int64s, num_kept: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """For rows whose first `num_kept` positions would be swapped out: the number of blocks in swap space, how many
        of them are there already, and the positions that these hold."""
        ends = -(-num_kept // self._block_size)
        held = np.minimum(ends, self._rows.num_offloaded[rows])
        num_blocks, num_held = np.zeros_like(ends), np.zeros_like(ends)
        for group in self.groups:
            if group.window:
                firsts = (num_kept - group.window + 1).clip(0) // self._block_size
                num_blocks += ends - firsts
                num_held += (held - firsts).clip(0)
            else:
                num_blocks += ends
                num_held += held
        return num_blocks, num_held, held * self._block_size

    def _swap_in(self, swapped: Swapped, sources: list[int], targets: list[int], step_id: int) -> None:
        """List the copies of what is no longer in the prefix cache. The swap blocks are free once the step has run."""
        self.copies.back(sources, targets)
        self.num_blocks_swapped_in += len(sources)
        self.swap.retire(swapped.blocks[::-1], step_id)

    def _restore(self, sources: list[int], targets: list[int], step_id: int) -> None:
        """List the copies of what was found in swap space, and hold it there until they are made."""
        for block in sources:
            self.swap.hold(block)
        self.copies.back(sources, targets)
        self.num_blocks_restored += len(sources)
        self.swap.retire(sources[::-1], step_id)

    # -------------------------------------------------------------------------------------------------- release

    def release(self, blocks: list[int], step_id: int | None) -> None:
        """Release a row's blocks, the tail first, once `step_id`, the last step that names them, is settled. With None,
        release them at once."""
        self.pool.release_after(blocks, step_id)

    def release_swapped(self, swapped: Swapped, step_id: int | None) -> None:
        """Release the swap blocks of a sequence that ended in swap space. Copies into them may still be in flight, but
        run before any later ones."""
        self.swap.release_after(swapped.blocks[::-1], step_id)
        self.states.release_swapped(swapped, step_id)

    def release_passed(self, step_id: int | None) -> None:
        """Release blocks that no later step reads, because all rows' windows have left them, once `step_id` is
        settled."""
        for row, group, blocks in self.windows.take_passed():
            self.pool.release_after(blocks, step_id)
            sequence = self._rows.sequences[row]
            assert sequence is not None
            self.offload.release_passed(sequence, group, len(blocks))

    def settle(self, step_id: int) -> None:
        """Release what was retired until this step."""
        self.pool.settle(step_id)
        self.swap.settle(step_id)
        if self.states.is_on:
            self.states.settle(step_id)

    def executor_lost(self, loss: ExecutorLoss) -> None:
        """The executor has died with all KV blocks. No row holds any."""
        self.copies.take()
        self.swap.forget_unwritten()
        if not loss.keeps_swap:
            self.swap.forget_all()
        self.pool.settle_all()
        self.swap.settle_all()
        self.pool.forget_all(loss.successor)
        self.states.executor_lost(loss.successor, keeps_swap=loss.keeps_swap)

    # --------------------------------------------------------------------------------------------- prefix cache

    def register(self, running: Int64s) -> None:
        """Add full blocks of these rows to the prefix cache: those whose ids are settled and whose KV is planned. A
        later step, or a later row of this step, may read them: steps run in order, and a step writes KV before it
        reads it."""
        if not self._prefix_caching:
            return
        rows = self._rows
        num_full = np.minimum(rows.num_tokens[running], rows.num_computed_tokens[running]) // self._block_size
        fresh = num_full > rows.num_registered[running]
        if np.count_nonzero(fresh):
            for index in fresh.nonzero()[0].tolist():
                self._register_row(int(running[index]), int(num_full[index]))

    def register_if_full(self, running: Int64s, num_tokens: Int64s) -> None:
        """`register` for decoding rows, of which a block can only be full if a row's number of ids, `known`, is a
        multiple of a block's."""
        if self._prefix_caching and np.count_nonzero(num_tokens % self._block_size) < len(num_tokens):
            self.register(running)

    def register_last(self, row: int) -> None:
        """Add the full blocks of a row that ends or is preempted. The KV of its last id may not be computed: the
        sequence may have stopped there."""
        num_full = int(min(self._rows.num_tokens[row] - 1, self._rows.num_computed_tokens[row])) // self._block_size
        if self._prefix_caching and num_full > self._rows.num_registered[row]:
            self._register_row(row, num_full)

    def publish_partial_blocks(self) -> None:
        """Let a successor of this process also find the blocks that are filled in part. All steps are settled, and none
        may follow."""
        if self._prefix_caching:
            self.register(self._rows.order)
            tail_keys = self._partial_blocks.publish(self._planned_step)
            if self.states.is_on:
                self.states.publish(tail_keys, self._planned_step)

    def reset_prefix_cache(self) -> int:
        """Empty the prefix cache, and keep what running rows compute out of it. Returns how many blocks it held."""
        self._rows.num_registered[self._rows.order] = NEVER_REGISTERED
        self.swap.forget_all()
        self.states.reset()
        return self.pool.forget_all()

    def _register_row(self, row: int, num_full: int) -> None:
        rows = self._rows
        sequence = rows.sequences[row]
        assert sequence is not None
        sequence.extend_keys(rows.ids[row], num_full, self._block_size)
        keys, register, num_registered = sequence.keys, self.pool.register, int(rows.num_registered[row])
        rows.num_registered[row] = num_full
        if self.windows.is_plain:
            for index in range(num_registered, num_full):
                register(int(rows.tables[0, row, index]), keys[index], self._planned_step)
            return
        firsts = rows.block_firsts[:, row].tolist()
        for index in range(num_registered, num_full):
            for group, block in enumerate(rows.tables[:, row, index].tolist()):
                if index >= firsts[group]:
                    register(block, prefix.group_key(keys[index], group), self._planned_step)

    def check(self, swapped: list[Swapped]) -> None:
        """Assert every invariant; for tests. `swapped` are all sequences in swap space."""
        rows, pool = self._rows, self.pool
        pool.check()
        self._check_swap(swapped)
        if self.states.is_on:
            self.states.check(swapped)
        num_held = 0
        for row in rows.order.tolist():
            assert rows.num_blocks[row] * self._block_size >= rows.num_computed_tokens[row], f"row {row} lacks a block"
            assert rows.num_blocks[row] == min(rows.block_ends[:, row])
            self.windows.check(row)
            blocks = rows.blocks_of(row)
            assert len(set(blocks)) == len(blocks), f"row {row} has a block twice"
            num_held += len(blocks)
        assert num_held + pool.num_retired == sum(map(pool.num_refs, range(pool.num_total))), (
            "a reference has no holder"
        )

    def _check_swap(self, swapped: list[Swapped]) -> None:
        self.swap.check()
        num_held = sum(len(one.blocks) for one in swapped)
        for row in self._rows.order.tolist():
            sequence = self._rows.sequences[row]
            assert sequence is not None
            for group, blocks in enumerate(sequence.offloaded):
                num = self._rows.num_offloaded[row] - self._rows.block_firsts[group, row]
                assert len(blocks) == max(0, num), f"row {row} holds other swap blocks than it has copied"
                num_held += len(blocks)
        assert num_held + self.swap.num_retired == sum(map(self.swap.num_refs, range(self.swap.num_total))), (
            "a reference to a swap block has no holder"
        )
