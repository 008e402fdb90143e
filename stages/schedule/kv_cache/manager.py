"""KV memory as sequences see it: what of their keys and values is there when they start, in whose blocks, and what has
to be copied so that it is.

    from the prefix cache   blocks that hold the first of its ids already, shared
    from a sibling          the prompt's blocks of a running sequence of the same request, shared but for the one that
                            the prompt ends in: both write to it, so the newcomer gets a copy (copy on write)
    from swap space         what it had when it was put back, copied

Whatever is shared is complete: full blocks are never written again.
"""

from bisect import bisect_left

import msgspec
import numpy as np

from pipeline.stages.schedule.arrays import Int64s
from pipeline.stages.schedule.kv_cache import prefix
from pipeline.stages.schedule.kv_cache.block_pool import BlockPool
from pipeline.stages.schedule.kv_cache.swap import BlockCopies, Swapped, SwapSpace
from pipeline.stages.schedule.policies.policy import may_start
from pipeline.stages.schedule.request import Sequence
from pipeline.stages.schedule.rows import Rows
from pipeline.stages.schedule.scheduler_config import SchedulerConfig

NEVER_KEYED = np.iinfo(np.int64).max
"""`num_keyed` of rows whose blocks are never to be found."""


class ComputedPrefix(msgspec.Struct):
    """What a sequence that takes a row begins with."""

    blocks: list[int]
    """Its table's first, which somebody has or had."""
    num_computed: int
    """Positions whose keys and values are there, or will be by the step's copies."""
    num_needed: int
    """Blocks that are still to be taken, to come behind those."""
    leader: int = -1
    """The row that it is a fork of."""


class KVCacheManager:
    """Owns the block pool, swap space and the copies of the next step."""

    def __init__(self, config: SchedulerConfig, rows: Rows) -> None:
        self.pool = BlockPool(config.num_blocks)
        self.swap = SwapSpace(config.num_swap_blocks, config.num_blocks)
        self.copies = BlockCopies()
        self._rows = rows
        self._block_size = config.block_size
        self._prefix_caching = config.prefix_caching
        self.num_swapped_out = self.num_swapped_in = self.num_forks = 0
        """Blocks, blocks and sequences, since start."""

    def blocks_for(self, num_ids: int) -> int:
        return -(-num_ids // self._block_size)

    # ---------------------------------------------------------------------------------------------------- start

    def start(self, sequence: Sequence, num_running: int, step_id: int) -> tuple[ComputedPrefix, list[int]] | None:
        """Give a sequence the blocks of all its ids, and list the copies that bring its keys and values into them; None
        where there are too few blocks. `step_id` is the step that is being planned."""
        pool = self.pool
        start = self._look(sequence)
        num_unheld = sum(map(pool.is_cached, start.blocks))
        if not may_start(pool.num_available, start.num_needed + num_unheld, num_running):
            return None
        for block in start.blocks:
            pool.hold(block)
        blocks = start.blocks + [pool.take() for _ in range(start.num_needed)]
        if start.leader >= 0:
            self._copy_fork(start, blocks)
        elif sequence.swapped is not None:
            self._swap_in(sequence.swapped, len(start.blocks), blocks, step_id)
            sequence.swapped = None
        return start, blocks

    def reach(self, sequence: Sequence) -> "BlockDemand":
        """For asking which rows would have to be put back to let a sequence start."""
        start = self._look(sequence)
        num_lacking = start.num_needed + sum(map(self.pool.is_cached, start.blocks))
        return BlockDemand(self.pool, num_lacking, set(start.blocks))

    def num_cached(self, sequence: Sequence) -> int:
        """About how many blocks of its ids are in the prefix cache. Tails are evicted first, so a binary search finds
        the end of what is there, unless somebody else's use has kept a tail alive."""
        if not self._prefix_caching or sequence.request.needs_full_prefill:
            return 0
        find = self.pool.find
        return bisect_left(self._keys_of(sequence), 1, key=lambda key: 0 if find(key) is not None else 1)

    def _look(self, sequence: Sequence) -> ComputedPrefix:
        """What there is of a sequence."""
        hits = self._hits(sequence)
        return self._fork(sequence, hits) or self._found(sequence, hits)

    def _found(self, sequence: Sequence, hits: list[int]) -> ComputedPrefix:
        """In the prefix cache, and behind it in swap space."""
        num_computed = len(hits) * self._block_size
        if sequence.swapped is not None:
            num_computed = max(num_computed, sequence.swapped.num_computed)
        return ComputedPrefix(hits, num_computed, self.blocks_for(len(sequence.ids)) - len(hits))

    def _fork(self, sequence: Sequence, hits: list[int]) -> ComputedPrefix | None:
        """From a sibling, where that is more than it finds otherwise."""
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
        return ComputedPrefix(blocks, num_computed, self.blocks_for(len(sequence.ids)) - num_full, ready[0])

    def _copy_fork(self, start: ComputedPrefix, blocks: list[int]) -> None:
        self.num_forks += 1
        num_shared = len(start.blocks)
        if start.num_computed > num_shared * self._block_size:
            source = int(self._rows.table[start.leader, num_shared])
            self.copies.add([source], [blocks[num_shared]], is_fork=True)

    # ----------------------------------------------------------------------------------------------------- swap

    def swap_out(self, row: int, num_kept: int) -> Swapped:
        """Have the blocks of a row's first positions copied to swap space, in which there is room for them."""
        num_blocks = self.blocks_for(num_kept)
        swapped = Swapped(self.swap.take(num_blocks), num_kept)
        self.copies.add(self._rows.table[row, :num_blocks].tolist(), swapped.blocks)
        self.num_swapped_out += num_blocks
        return swapped

    def _swap_in(self, swapped: Swapped, num_shared: int, blocks: list[int], step_id: int) -> None:
        """Bring back what is not in the prefix cache still. The swap blocks are free when the step has done that."""
        sources = swapped.blocks[num_shared:]
        self.copies.add(sources, blocks[num_shared : num_shared + len(sources)])
        self.num_swapped_in += len(sources)
        self.swap.retire(swapped.blocks, step_id)

    # -------------------------------------------------------------------------------------------------- release

    def release(self, blocks: list[int], step_id: int | None) -> None:
        """Give back a row's blocks, the tail first, when `step_id` is settled, the last that names them; or at once."""
        if step_id is None:
            self.pool.release(blocks)
        else:
            self.pool.retire(blocks, step_id)

    def give_up(self, swapped: Swapped, step_id: int | None) -> None:
        """Free swap blocks that nobody comes back for. Copies into them may still be under way, but are made before any
        later ones."""
        if step_id is None:
            self.swap.release(swapped.blocks)
        else:
            self.swap.retire(swapped.blocks, step_id)

    def settle(self, step_id: int) -> None:
        """A step has run."""
        self.pool.settle(step_id)
        self.swap.settle(step_id)

    # ------------------------------------------------------------------------------------------- prefix cache

    def register(self, running: Int64s) -> None:
        """Offer full blocks of these rows to others: those whose ids are settled and whose keys and values are planned.
        A later step, or a later row of this one, may read them: steps run in order, and a step writes before it
        reads."""
        if not self._prefix_caching:
            return
        rows = self._rows
        num_full = np.minimum(rows.known[running], rows.planned[running]) // self._block_size
        fresh = num_full > rows.num_keyed[running]
        if fresh.any():
            for place in fresh.nonzero()[0].tolist():
                self._register_row(int(running[place]), int(num_full[place]))

    def register_last(self, row: int) -> None:
        """Offer what a row has that leaves. Of the id that it may have stopped at, nothing is computed."""
        num_full = int(min(self._rows.known[row] - 1, self._rows.planned[row])) // self._block_size
        if self._prefix_caching and num_full > self._rows.num_keyed[row]:
            self._register_row(row, num_full)

    def forget(self) -> int:
        """Let nothing be found any more, nor what running rows will compute. Returns how many blocks could be."""
        self._rows.num_keyed[self._rows.order] = NEVER_KEYED
        return self.pool.forget_all()

    def _register_row(self, row: int, num_full: int) -> None:
        rows = self._rows
        sequence = rows.sequences[row]
        assert sequence is not None
        prefix.extend(sequence.keys, rows.ids[row], num_full, self._block_size, sequence.request.root)
        for place in range(int(rows.num_keyed[row]), num_full):
            self.pool.register(int(rows.table[row, place]), sequence.keys[place])
        rows.num_keyed[row] = num_full

    def _keys_of(self, sequence: Sequence) -> list[bytes]:
        """Keys of the full blocks that a sequence without a row may find. Its last id is computed in any case: the next
        one is drawn from its logits."""
        request, num_blocks = sequence.request, (len(sequence.ids) - 1) // self._block_size
        if request.n > 1 and not sequence.keys:  # hashed once for all
            prefix.extend(
                request.keys, request.prompt, len(request.prompt) // self._block_size, self._block_size, request.root
            )
            sequence.keys = list(request.keys)
        prefix.extend(sequence.keys, sequence.ids, num_blocks, self._block_size, sequence.request.root)
        return sequence.keys[:num_blocks]

    def _hits(self, sequence: Sequence) -> list[int]:
        """The longest run of blocks, from the first, that hold a sequence's ids already."""
        if not self._prefix_caching or sequence.request.needs_full_prefill:
            return []
        hits: list[int] = []
        for key in self._keys_of(sequence):
            block = self.pool.find(key)
            if block is None:
                break
            hits.append(block)
        return hits

    def check(self) -> None:
        """Assert every invariant; for tests."""
        rows, pool = self._rows, self.pool
        pool.check()
        num_held = 0
        for row in rows.order.tolist():
            assert rows.num_blocks[row] * self._block_size >= rows.planned[row], f"row {row} lacks a block"
            table = rows.table[row, : rows.num_blocks[row]].tolist()
            assert len(set(table)) == len(table), f"row {row} has a block twice"
            num_held += len(table)
        assert num_held + pool.num_retired == sum(map(pool.num_refs, range(pool.num_total))), (
            "a reference belongs to nobody"
        )


class BlockDemand:
    """How many blocks are available to one sequence if some rows are put back, once steps in flight are settled."""

    def __init__(self, pool: BlockPool, num_lacking: int, shared: set[int]) -> None:
        """`shared` are blocks that it holds itself in any case."""
        self._pool = pool
        self._num_lacking = num_lacking
        self._shared = shared
        self._num = pool.num_available
        self._returning: dict[int, int] = {}
        for blocks in pool.retired():
            self.add(blocks)

    def add(self, blocks: list[int]) -> None:
        """One more reference of each of these goes."""
        for block in blocks:
            count = self._returning[block] = self._returning.get(block, 0) + 1
            if count == self._pool.num_refs(block) and block not in self._shared:
                self._num += 1

    def want(self, num_blocks: int) -> None:
        """So many more are needed, by another sequence."""
        self._num_lacking += num_blocks

    def suffices(self, num_running: int) -> bool:
        """Whether all that is needed is there then, beside so many rows."""
        return may_start(self._num, self._num_lacking, num_running)
