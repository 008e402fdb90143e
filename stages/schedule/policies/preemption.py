"""Which running sequences are preempted if blocks run out, and whether their KV is swapped out: by the time that it
takes to resume them, estimated from measured rates."""

import numpy as np

from pipeline.stages.schedule.arrays import Bools, Float64s, Int64s
from pipeline.stages.schedule.kv_cache.manager import KVCacheManager
from pipeline.stages.schedule.media.spans import MediaSpans
from pipeline.stages.schedule.policies.step_cost_model import StepCostModel
from pipeline.stages.schedule.row_flags import RowFlag
from pipeline.stages.schedule.rows import RowTracker
from pipeline.stages.schedule.scheduler_config import PreemptionMode


class PreemptionCosts:
    """Estimates what it costs to resume preempted sequences. Changes nothing."""

    def __init__(
        self,
        mode: PreemptionMode,
        rows: RowTracker,
        cost_model: StepCostModel,
        kv_cache_manager: KVCacheManager,
        block_size: int,
        media: MediaSpans,
    ) -> None:
        self._media = media
        self._mode = mode
        self._rows = rows
        self._cost_model = cost_model
        self._kv_cache_manager = kv_cache_manager
        self._block_size = block_size

    def num_kept(self, rows: Int64s) -> Int64s:
        """Positions of these rows whose KV belongs to settled ids. The last id is always computed again: the next id is
        sampled from its logits."""
        return np.minimum(self._rows.num_computed_tokens[rows], self._rows.num_tokens[rows] - 1).clip(0)

    def swaps(self, row: int) -> bool:
        """Whether a row would be swapped out rather than computed again."""
        _, swaps = self.costs_s(np.array([row]))
        return bool(swaps[0])

    def costs_s(self, rows: Int64s) -> tuple[Float64s, Bools]:
        """Seconds that it takes to resume each of these rows, and whether from swap space."""
        num_kept = self.num_kept(rows)
        manager = self._kv_cache_manager
        # Blocks that are in swap space already are copied back either way.
        num_blocks, num_offloaded, num_held = manager.num_swap_blocks(rows, num_kept)
        # 0 until a copy was measured, so that one will be.
        block_s = manager.copies.block_s
        states = manager.states
        num_lacking = states.num_lacking(rows, num_kept, num_held) if states.is_on else (num_kept - num_held).clip(0)
        compute_s = self._cost_model.prefill_times_s(num_lacking) + num_offloaded * block_s
        if self._rows.all_flags & RowFlag.MEDIA:
            compute_s += self._media.recompute_s(rows)
        swap_s = (2 * num_blocks - num_offloaded) * block_s
        has_room = num_blocks - num_offloaded <= manager.swap.num_available
        swaps: Bools = (num_blocks > 0) & has_room & ~self._rows.have(RowFlag.FULL_PREFILL, rows)
        if states.is_on:
            swap_s += 2 * states.num_slot_blocks * block_s
            swaps &= states.may_swap(rows, num_kept)
        if self._mode == "recompute":
            swaps[:] = False
        elif self._mode == "auto":
            swaps &= swap_s <= compute_s
        return np.where(swaps, swap_s, compute_s), swaps


class Victims:
    """Rows that one plan may preempt, by order."""

    def __init__(self, costs: PreemptionCosts, rows: RowTracker, candidates: Int64s) -> None:
        self._candidates = candidates
        self._costs_s, _ = costs.costs_s(candidates)
        self._ranks = rows.priority_key[candidates]
        self._left = np.ones(len(candidates), np.bool_)

    def take(self, after: int = -1, above: int | None = None) -> int | None:
        """Remove and return a row: of the candidates after a place, of the highest rank among them, the one that costs
        least to resume; of equals, the last. Returns None if there is none, or if its rank is not above `above`."""
        indices = self._left[after + 1 :].nonzero()[0] + after + 1
        if len(indices) == 0 or (above is not None and self._ranks[indices[-1]] <= above):
            return None
        indices = indices[self._ranks[indices] == self._ranks[indices[-1]]]
        index = int(indices[len(indices) - 1 - int(np.argmin(self._costs_s[indices][::-1]))])
        self._left[index] = False
        return int(self._candidates[index])

    def drop(self, indices: Int64s) -> None:
        """Remove the candidates at these places."""
        self._left[indices] = False
