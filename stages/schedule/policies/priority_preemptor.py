"""Making way: which rows a policy that preempts puts back, so that sequences of a lower rank start in their stead.

Nobody is put back without use. What a sequence that waits shares with others counts as there, and so does what returns
by itself; a block of a row that is put back counts only if nobody else holds it; no more are put back than it takes,
and for no more sequences than the step has tokens for. And whoever way was made for starts before others of its rank.
"""

from collections.abc import Iterable
from itertools import chain

import numpy as np

from pipeline.stages.schedule.arrays import Int64s
from pipeline.stages.schedule.kv_cache.manager import BlockDemand, KVCacheManager
from pipeline.stages.schedule.policies.preemption import PreemptionCosts, Victims
from pipeline.stages.schedule.request import Sequence
from pipeline.stages.schedule.rows import Rows

RETRY_STEPS = 16
"""Steps after which it is asked again whether somebody could be put back with any use."""


class PriorityPreemptor:
    """Owns for whom way was made. It puts nobody back itself."""

    def __init__(self, rows: Rows, kv_cache_manager: KVCacheManager, preemption: PreemptionCosts) -> None:
        self._rows = rows
        self._kv_cache_manager = kv_cache_manager
        self._preemption = preemption
        self.preempted_for: list[Sequence] = []
        """By order; each until it starts."""
        self._last_failure = (0, 0, 0)
        """For whom nobody could be put back with any use, and when: `Rows.num_changes`, and about which step."""

    def is_next(self, sequence: Sequence) -> bool:
        """Whether a sequence is the next that way was made for."""
        return bool(self.preempted_for) and self.preempted_for[0] is sequence

    def forget(self, sequence: Sequence) -> None:
        """It has started, or ended."""
        if self.preempted_for:
            self.preempted_for = [other for other in self.preempted_for if other is not sequence]

    def may_preempt(self) -> bool:
        """Whether nobody waits for way that was made. Where what was to come back is there, and others have taken of
        it, way has to be made once more."""
        if self.preempted_for and not self._kv_cache_manager.pool.num_retired:
            if self._kv_cache_manager.reach(self.preempted_for[0]).suffices(0):
                return False
            self.preempted_for = []
        return not self.preempted_for

    def choose_victims(
        self, first: Sequence, behind: Iterable[Sequence], ending: Int64s, num_tokens: int, step_id: int
    ) -> list[int]:
        """The rows to put back for who would start `first`, and for those `behind` it, while `num_tokens` last.
        `ending` are rows that have all their ids: they leave by themselves. If there are any rows, way is made."""
        rows = self._rows
        moment = first.seq, rows.num_changes, step_id // RETRY_STEPS
        if moment == self._last_failure:
            return []
        worse = rows.order[rows.rank[rows.order] > first.order[0]]
        worse = worse[~np.isin(worse, ending)]
        if len(worse) == 0:
            return []
        reach = self._kv_cache_manager.reach(first)
        for row in ending.tolist():
            reach.add(rows.blocks_of(row))
        victims = Victims(self._preemption, rows, worse)
        num_free, num_running = rows.num_free + len(ending), len(rows) - len(ending)
        put_back: list[int] = []
        heads: list[Sequence] = []
        for head in chain((first,), behind):
            if heads:
                num_tokens -= len(heads[-1].ids)
                if num_tokens <= 0:
                    break
                reach.want(self._kv_cache_manager.blocks_for(len(head.ids)))
            num_spare_rows = num_free + len(put_back) - len(heads) - 1
            num_beside = num_running + len(heads) - len(put_back)
            chosen = self._chosen(victims, reach, head.order[0], num_spare_rows, num_beside)
            if chosen is None:
                break  # not even all of them would do for this one
            heads.append(head)
            put_back += chosen
        if not heads:
            self._last_failure = moment
        self.preempted_for = heads if put_back else []
        return put_back

    def _chosen(
        self, victims: Victims, reach: BlockDemand, rank: int, num_spare_rows: int, num_running: int
    ) -> list[int] | None:
        """The fewest rows of a rank above `rank` that leave no row and no block lacking; None where all are too few."""
        chosen: list[int] = []
        while num_spare_rows + len(chosen) < 0 or not reach.suffices(num_running - len(chosen)):
            row = victims.take(above=rank)
            if row is None:
                return None
            chosen.append(row)
            reach.add(self._rows.blocks_of(row))
        return chosen
