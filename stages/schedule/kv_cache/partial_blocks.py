"""The last blocks of running sequences, which are filled in part, for the successor of a scheduler that is replaced on
purpose. Full blocks have keys anyway.

    all steps are settled ──► each tail gets a key, of the ids that are in it
                                └──► the successor finds it by the ids of the sequence, takes it for that one alone, and
                                     forgets the key before it computes the next position

After a crash, tails are computed again: to hash them in each step would cost more than all else about it.
"""

from pipeline.stages.schedule.kv_cache import prefix
from pipeline.stages.schedule.kv_cache.block_pool import BlockPool
from pipeline.stages.schedule.kv_cache.states.pools import StatePools
from pipeline.stages.schedule.request import Sequence
from pipeline.stages.schedule.row_flags import RowFlag
from pipeline.stages.schedule.rows import NEVER_REGISTERED, RowTracker


class PartialBlocks:
    """Gives tails keys, and finds those of the process before."""

    def __init__(self, rows: RowTracker, pool: BlockPool, block_size: int, num_groups: int, states: StatePools) -> None:
        self._states = states
        self._rows = rows
        self._pool = pool
        self._block_size = block_size
        self._num_groups = num_groups

    def publish(self, step_id: int) -> dict[int, bytes]:
        """Give the tails of running rows keys, and return these by row. `step_id`, the last step, is settled, and all
        full blocks are registered."""
        rows, keys = self._rows, dict[int, bytes]()
        for row in rows.order[rows.num_registered[rows.order] < NEVER_REGISTERED].tolist():
            num_full, rest = divmod(int(min(rows.num_tokens[row], rows.num_computed_tokens[row])), self._block_size)
            sequence = rows.sequences[row]
            assert sequence is not None
            if not rest or rows.flags[row] & RowFlag.BEAM:  # a beam search begins again with its prompt
                continue
            request = sequence.request
            sequence.extend_keys(rows.ids[row], num_full, self._block_size)
            parent = sequence.keys[num_full - 1] if num_full else request.root
            begin = num_full * self._block_size
            extra = request.extras.get(num_full, b"")
            keys[row] = key = prefix.tail_key(parent, rows.ids[row, begin : begin + rest], extra)
            for group, table in enumerate(rows.tables):
                self._pool.register(int(table[row, num_full]), prefix.group_key(key, group), step_id)
        self._pool.settle(step_id)
        return keys

    def find(self, sequence: Sequence, keys: list[bytes], num_hits: int) -> tuple[int, list[int], bytes]:
        """For a sequence of which `num_hits` full blocks were found, by the first of its `keys`: the number of
        positions that are computed, and the tail behind these blocks in each KV group, with its key, if it was
        found."""
        begin, request = num_hits * self._block_size, sequence.request
        if request.attempt == 1 or sequence.swapped is not None or request.needs_full_prefill:
            return begin, [], b""
        parent, extra = keys[num_hits - 1] if num_hits else request.root, request.extras.get(num_hits, b"")
        # The last id is always computed.
        for end in range(min(begin + self._block_size, len(sequence.ids)) - 1, begin, -1):
            key = prefix.tail_key(parent, sequence.ids[begin:end], extra)
            found = [self._pool.find(prefix.group_key(key, group)) for group in range(self._num_groups)]
            tails = [block for block in found if block is not None and self._pool.is_cached(block)]
            if len(tails) == len(found) and self._states.has_tail(key):
                return end, tails, key
        return begin, [], b""
