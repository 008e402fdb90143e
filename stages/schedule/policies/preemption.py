"""Whose blocks are taken when there are too few, and whether its keys and values are kept: by what it costs to bring
the sequence back, from measured rates."""

import numpy as np

from pipeline.stages.schedule.arrays import Bools, Float64s, Int64s
from pipeline.stages.schedule.kv_cache.manager import KVCacheManager
from pipeline.stages.schedule.policies.step_cost_model import StepCostModel
from pipeline.stages.schedule.rows import Rows
from pipeline.stages.schedule.scheduler_config import PreemptionMode


class PreemptionCosts:
    """Knows costs; it changes nothing."""

    def __init__(
        self,
        means: PreemptionMode,
        rows: Rows,
        cost_model: StepCostModel,
        kv_cache_manager: KVCacheManager,
        block_size: int,
    ) -> None:
        self._means = means
        self._rows = rows
        self._cost_model = cost_model
        self._kv_cache_manager = kv_cache_manager
        self._block_size = block_size

    def num_kept(self, rows: Int64s) -> Int64s:
        """Positions of rows whose keys and values hold for their settled ids. The last id is computed in any case, for
        the next one is drawn from its logits."""
        return np.minimum(self._rows.planned[rows], self._rows.known[rows] - 1).clip(0)

    def swaps(self, row: int) -> bool:
        """Whether a row's blocks are copied to swap space, where there is room for them, rather than computed again."""
        _, swaps = self.costs_s(np.array([row]))
        return bool(swaps[0])

    def costs_s(self, rows: Int64s) -> tuple[Float64s, Bools]:
        """Seconds that it takes to bring each of these rows back, and whether that is from swap space."""
        num_kept = self.num_kept(rows)
        num_blocks = -(-num_kept // self._block_size)
        compute_s = self._cost_model.prefill_times_s(num_kept)
        # Nothing, until a copy was measured: so one will be.
        swap_s = 2 * num_blocks * self._kv_cache_manager.copies.block_s
        swaps: Bools = (
            (num_blocks > 0)
            & (num_blocks <= self._kv_cache_manager.swap.num_free)
            & ~self._rows.needs_full_prefill[rows]
        )
        if self._means == "recompute":
            swaps[:] = False
        elif self._means == "auto":
            swaps &= swap_s <= compute_s
        return np.where(swaps, swap_s, compute_s), swaps


class Victims:
    """Rows that may be put back in one plan, by order."""

    def __init__(self, preemption: PreemptionCosts, rows: Rows, candidates: Int64s) -> None:
        self._candidates = candidates
        self._costs_s, _ = preemption.costs_s(candidates)
        self._ranks = rows.rank[candidates]
        self._left = np.ones(len(candidates), np.bool_)

    def take(self, behind: int = -1, above: int | None = None) -> int | None:
        """Of the highest rank among those behind a place, the one that costs least to bring back; of equals, the last.
        It is taken out. None where there are none, or that rank is not above one that is given."""
        places = self._left[behind + 1 :].nonzero()[0] + behind + 1
        if len(places) == 0 or (above is not None and self._ranks[places[-1]] <= above):
            return None
        places = places[self._ranks[places] == self._ranks[places[-1]]]
        place = int(places[len(places) - 1 - int(np.argmin(self._costs_s[places][::-1]))])
        self._left[place] = False
        return int(self._candidates[place])

    def drop(self, places: Int64s) -> None:
        """Those at these places are not to be put back."""
        self._left[places] = False
