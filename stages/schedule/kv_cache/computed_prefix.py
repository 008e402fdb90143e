"""Which positions of a sequence are computed already when it starts, and which blocks hold them. Changes nothing."""

from bisect import bisect_left

import msgspec

from pipeline.stages.schedule.kv_cache import prefix
from pipeline.stages.schedule.kv_cache.block_pool import BlockPool
from pipeline.stages.schedule.kv_cache.lookup import FoundBlocks, PrefixLookup
from pipeline.stages.schedule.kv_cache.offload import KVOffload
from pipeline.stages.schedule.kv_cache.partial_blocks import PartialBlocks
from pipeline.stages.schedule.kv_cache.states.pools import StatePools
from pipeline.stages.schedule.kv_cache.windows import WindowBlocks
from pipeline.stages.schedule.request import Sequence
from pipeline.stages.schedule.rows import RowTracker
from pipeline.stages.schedule.scheduler_config import SchedulerConfig


class ComputedPrefix(msgspec.Struct):
    """The part of a sequence that need not be computed when it starts."""

    found: list[FoundBlocks]
    """For each KV group, the first blocks of the sequence's block table."""
    num_computed: int
    """Positions whose KV is there, or will be after the step's copies."""
    ends: list[int]
    """For each KV group, the end of the block table: blocks to allocate are at the places up to it."""
    fork_of: int = -1
    """The row that the sequence forks from."""
    tails: list[int] = []
    """For each KV group, a block behind those found, of which the first positions are computed. Empty: there is none.
    """
    state: int | None = None
    """With recurrent layers, the slot with the state behind the computed positions; ~s is slot s of swap space. None:
    nothing is computed."""
    is_restored: bool = False
    """Whether the state was found in swap space by its key."""
    branch: int = 0
    """With recurrent layers, the positions whose KV is there, if it is for more than there is a state for."""

    @property
    def shared(self) -> list[int]:
        """Blocks that the sequence shares."""
        return [block for found in self.found for block in found.blocks if block >= 0]

    @property
    def num_shared(self) -> int:
        """Places, from the first, whose blocks are shared in all groups."""
        return min(found.num_shared for found in self.found)

    def num_new_blocks(self, num_shared: int) -> int:
        """Blocks to allocate, besides `num_shared` shared ones."""
        return sum(end - found.first for found, end in zip(self.found, self.ends, strict=True)) - num_shared


class ComputedPrefixes:
    """Finds the computed prefixes of sequences without a row."""

    def __init__(
        self,
        config: SchedulerConfig,
        rows: RowTracker,
        pool: BlockPool,
        lookup: PrefixLookup,
        partial_blocks: PartialBlocks,
        windows: WindowBlocks,
        offload: KVOffload,
        states: StatePools,
    ) -> None:
        self._states = states
        self._rows = rows
        self._pool = pool
        self._lookup = lookup
        self._partial_blocks = partial_blocks
        self._windows = windows
        self._offload = offload
        self._groups = config.kv_groups
        self._block_size = config.block_size
        self._max_chunk = config.max_chunk
        self._prefix_caching = config.prefix_caching
        self._is_encoder = config.is_encoder

    def find(self, sequence: Sequence) -> ComputedPrefix:
        """The longest computed prefix of a sequence that starts: shared, forked or in swap space."""
        if self._is_encoder:
            return ComputedPrefix([FoundBlocks(0, [])], 0, self._ends(len(sequence.ids), 0))
        keys: list[bytes] = []
        if self._prefix_caching and not sequence.request.needs_full_prefill:
            keys = self._keys_of(sequence)
        found = self._find_by_key(sequence, keys, with_swap=False)
        fork = self._find_fork(sequence, found.num_computed)
        if fork is not None:
            return fork
        if (swapped := sequence.swapped) is not None:
            if swapped.num_computed > found.num_computed:
                found.num_computed, found.found = swapped.num_computed, self._lookup.swapped(keys, swapped)
                found.state = ~swapped.state if self._states.is_on else None
        elif self._offload.is_on:
            found = self._find_by_key(sequence, keys, with_swap=True)
        found.ends = self._ends(len(sequence.ids), found.num_computed)
        return found

    def _find_by_key(self, sequence: Sequence, keys: list[bytes], *, with_swap: bool) -> ComputedPrefix:
        """What is found by keys, without the ends of the block tables."""
        num_blocks, found = self._lookup.longest(keys, with_swap=with_swap)
        num_computed, tails, tail_key = self._partial_blocks.find(sequence, keys, num_blocks)
        if not self._states.is_on:
            return ComputedPrefix(found, num_computed, [], tails=tails)
        if tails:
            return ComputedPrefix(found, num_computed, [], tails=tails, state=self._states.find(tail_key))
        num_hits, found = self._with_state(keys, num_blocks, found, with_swap=with_swap)
        state = self._states.find(keys[num_hits - 1], with_swap=with_swap) if num_hits else None
        branch = num_blocks * self._block_size if num_blocks > num_hits else 0
        return ComputedPrefix(found, num_hits * self._block_size, [], state=state, branch=branch)

    def _with_state(
        self, keys: list[bytes], num_blocks: int, found: list[FoundBlocks], *, with_swap: bool
    ) -> tuple[int, list[FoundBlocks]]:
        """The longest prefix that all KV groups can continue behind, and behind which there is a state; as
        `PrefixLookup.longest`, which has returned `num_blocks` and `found`."""
        while (longest := self._states.longest(keys[:num_blocks], with_swap=with_swap)) < num_blocks:
            num_blocks, found = self._lookup.longest(keys[:longest], with_swap=with_swap)
        return num_blocks, found

    def _ends(self, num_ids: int, num_computed: int) -> list[int]:
        """The places of the block tables of a sequence that starts: with full attention for all ids, so that
        half-computed prompts can't wait for each other's blocks; with a window for the largest chunk."""
        end = -(-num_ids // self._block_size)
        next_end = min(end, -(-(num_computed + self._max_chunk) // self._block_size))
        return [next_end if group.window else end for group in self._groups]

    def _find_fork(self, sequence: Sequence, num_cached: int) -> ComputedPrefix | None:
        """In a running sequence of the same request, if that has more than the `num_cached` positions of the prefix
        cache."""
        request, rows = sequence.request, self._rows
        if request.n == 1 or sequence.swapped is not None or self._states.is_on:  # its state is behind the prompt
            return None
        num_prompt = len(request.prompt)
        num_computed = min(num_prompt, len(sequence.ids) - 1)
        if num_cached >= num_computed:
            return None
        firsts = [group.first_block(num_computed, self._block_size) for group in self._groups]
        running = [other.row for other in request.open_sequences.values() if other.row >= 0]
        ready = (
            row
            for row in running
            if rows.num_computed_before[row] >= num_prompt and self._windows.has_blocks_from(row, firsts)
        )
        row = next(ready, None)
        if row is None:
            return None
        num_full = num_computed // self._block_size
        found = [
            FoundBlocks(first, table[row, first:num_full].tolist())
            for table, first in zip(rows.tables, firsts, strict=True)
        ]
        return ComputedPrefix(found, num_computed, self._ends(len(sequence.ids), num_computed), fork_of=row)

    def num_cached_blocks(self, sequence: Sequence) -> int:
        """About how many blocks of a sequence's ids are in the prefix cache. Tails are evicted first, so a binary
        search finds the end of the cached part, unless another request has kept a tail alive."""
        if not self._prefix_caching or sequence.request.needs_full_prefill:
            return 0
        keys = self._keys_of(sequence)
        if self._states.is_on:
            return self._with_state(keys, *self._lookup.longest(keys, with_swap=False), with_swap=False)[0]
        if len(self._windows.by_window):
            return self._lookup.longest(keys, with_swap=False)[0]
        find = self._pool.find
        return bisect_left(keys, 1, key=lambda key: 0 if find(key) is not None else 1)

    def _keys_of(self, sequence: Sequence) -> list[bytes]:
        """Keys of the full blocks that a sequence without a row may find. Its last id is always computed: the next id
        is sampled from its logits."""
        request, num_blocks = sequence.request, (len(sequence.ids) - 1) // self._block_size
        if request.n > 1 and not sequence.keys:  # hash the prompt once for all parallel samples
            num_prompt_blocks = len(request.prompt) // self._block_size
            prefix.extend(
                request.keys, request.prompt, num_prompt_blocks, self._block_size, request.root, request.extras
            )
            sequence.keys = list(request.keys)
        sequence.extend_keys(sequence.ids, num_blocks, self._block_size)
        return sequence.keys[:num_blocks]
