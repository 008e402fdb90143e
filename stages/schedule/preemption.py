"""Whose blocks are taken when there are too few, and whether its keys and values are kept: by what it costs to bring
the sequence back, from measured rates."""

import numpy as np

from pipeline.stages.schedule.arrays import Int64s
from pipeline.stages.schedule.limits import Means
from pipeline.stages.schedule.memory import Memory
from pipeline.stages.schedule.pace import StepTimes
from pipeline.stages.schedule.rows import Rows


class Preemption:
    """Chooses; it changes nothing."""

    def __init__(self, means: Means, rows: Rows, times: StepTimes, memory: Memory, block_size: int) -> None:
        self._means = means
        self._rows = rows
        self._times = times
        self._memory = memory
        self._block_size = block_size

    def num_kept(self, row: int) -> int:
        """Positions of a row whose keys and values hold for its settled ids. The last id is computed in any case, for
        the next one is drawn from its logits."""
        return max(0, min(int(self._rows.planned[row]), int(self._rows.known[row]) - 1))

    def swaps(self, row: int) -> bool:
        """Whether a row's blocks are copied to swap space, where there is room for them, rather than computed again."""
        num_kept = self.num_kept(row)
        num_blocks = -(-num_kept // self._block_size)
        if self._means == "recompute" or not 0 < num_blocks <= self._memory.swap.num_free:
            return False
        return self._means == "swap" or self._swap_s(num_blocks) <= self._times.prefill_s(0, num_kept)

    def cheapest(self, candidates: Int64s) -> int:
        """Among rows of the highest rank of these, the one that costs least to bring back; of equals, the last.

        Args:
            candidates: int64, rows by order, one at least.
        """
        rows = self._rows
        ranks = rows.rank[candidates]
        candidates = candidates[ranks == ranks.max()]
        if len(candidates) == 1:
            return int(candidates[0])
        costs = [self._cost_s(row) for row in candidates.tolist()]
        return int(candidates[len(costs) - 1 - int(np.argmin(costs[::-1]))])

    def _cost_s(self, row: int) -> float:
        num_kept = self.num_kept(row)
        if self.swaps(row):
            return self._swap_s(-(-num_kept // self._block_size))
        return self._times.prefill_s(0, num_kept)

    def _swap_s(self, num_blocks: int) -> float:
        """Out and in again. Nothing, until a copy was measured: so one will be."""
        return 2 * num_blocks * self._memory.copies.block_s
