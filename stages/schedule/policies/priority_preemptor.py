"""Preemption by priority: which running rows give way to waiting sequences of a lower rank.

Rows are preempted only if that lets a sequence start. Blocks that the sequence shares count as available, as do blocks
that steps in flight will release. A block of a preempted row counts only if no other row holds it. No more rows are
preempted than needed, for no more sequences than the step has tokens for. The request that triggered the preemption
starts first.
"""

from collections.abc import Iterable
from itertools import chain

import numpy as np

from pipeline.stages.schedule.arrays import Int64s
from pipeline.stages.schedule.kv_cache.block_demand import BlockDemand
from pipeline.stages.schedule.kv_cache.manager import KVCacheManager
from pipeline.stages.schedule.policies.preemption import PreemptionCosts, Victims
from pipeline.stages.schedule.request import Sequence
from pipeline.stages.schedule.rows import RowTracker

RETRY_STEPS = 16
"""Steps after which a search that found no victims is repeated."""


class PriorityPreemptor:
    """Owns the sequences that rows were preempted for. Chooses victims; the planner preempts them."""

    def __init__(self, rows: RowTracker, kv_cache_manager: KVCacheManager, costs: PreemptionCosts) -> None:
        self._rows = rows
        self._kv_cache_manager = kv_cache_manager
        self._costs = costs
        self.preempted_for: list[Sequence] = []
        """By order; each until it starts."""
        self._last_failure = (0, 0, 0)
        """The last search without victims: for which `seq`, at which `RowTracker.num_changes`, and about which step."""

    def reset(self) -> None:
        """No row runs any more."""
        self.preempted_for = []
        self._last_failure = (0, 0, 0)

    def is_next(self, sequence: Sequence) -> bool:
        """Whether a sequence is the first of those that rows were preempted for."""
        return bool(self.preempted_for) and self.preempted_for[0] is sequence

    def forget(self, sequence: Sequence) -> None:
        """Call when a sequence has started or finished."""
        if self.preempted_for:
            self.preempted_for = [other for other in self.preempted_for if other is not sequence]

    def may_preempt(self) -> bool:
        """Whether no sequence is still waiting for preempted blocks. If all blocks were released and others have taken
        some of them, rows have to be preempted again."""
        if self.preempted_for and not self._kv_cache_manager.pool.num_retired:
            if self._kv_cache_manager.demand_of(self.preempted_for[0]).is_met(0):
                return False
            self.preempted_for = []
        return not self.preempted_for

    def choose_victims(
        self, first: Sequence, following: Iterable[Sequence], ending: Int64s, num_tokens: int, step_id: int
    ) -> list[int]:
        """The rows to preempt so that `first` and the `following` sequences can start, while `num_tokens` last.
        `ending` are rows that have all their ids: they leave without preemption. Sets `preempted_for`."""
        rows = self._rows
        attempt = first.seq, rows.num_changes, step_id // RETRY_STEPS
        if attempt == self._last_failure:
            return []
        worse = rows.order[rows.priority_key[rows.order] > first.order[0]]
        worse = worse[~np.isin(worse, ending)]
        if len(worse) == 0:
            return []
        demand = self._kv_cache_manager.demand_of(first)
        for row in ending.tolist():
            demand.release(rows.blocks_of(row))
        candidates = Victims(self._costs, rows, worse)
        num_free, num_running = rows.num_free + len(ending), len(rows) - len(ending)
        victims: list[int] = []
        starting: list[Sequence] = []
        for sequence in chain((first,), following):
            if starting:
                num_tokens -= len(starting[-1].ids)
                if num_tokens <= 0:
                    break
                demand.add(self._kv_cache_manager.most_blocks(len(sequence.ids)))
            num_spare_rows = num_free + len(victims) - len(starting) - 1
            num_beside = num_running + len(starting) - len(victims)
            chosen = self._choose(candidates, demand, sequence.order[0], num_spare_rows, num_beside)
            if chosen is None:
                break  # even all candidates are not enough for this one
            starting.append(sequence)
            victims += chosen
        if not starting:
            self._last_failure = attempt
        self.preempted_for = starting if victims else []
        return victims

    def _choose(
        self, candidates: Victims, demand: BlockDemand, rank: int, num_spare_rows: int, num_running: int
    ) -> list[int] | None:
        """The fewest rows of a rank above `rank` that free enough rows and blocks; None if all are too few."""
        chosen: list[int] = []
        while num_spare_rows + len(chosen) < 0 or not demand.is_met(num_running - len(chosen)):
            row = candidates.take(above=rank)
            if row is None:
                return None
            chosen.append(row)
            demand.release(self._rows.blocks_of(row))
        return chosen
