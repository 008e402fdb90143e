"""Rows whose grammar masks are slow run in turns, so that these masks take at most SHARE of the time.

A step waits for the masks of all its rows. A client's grammar may be made so that each of its masks takes a tenth of a
second, and some of them would hold up every other row at every step.

    a slow mask ──► its row is paced: one paced row in a step, and none before the last slow mask's time / SHARE is over
                      └── NUM_QUICK masks that are not slow ──► no more

Without rows that are not paced, one paced row runs in each step. Prompts wait only for their last position. New rows
with a grammar are paced from their first step while their scope has had slow masks lately, so that requests of a few
tokens gain nothing.

As they run in turns, many paced rows produce no more than a few, and would keep rows and blocks from all others. So
they have a quarter of the rows and of the blocks, and a scope half of that. What is paced beyond waits; what has become
paced while it ran is preempted when others find no room.
"""

from collections import Counter
from collections.abc import Iterable

from pipeline.stages.schedule.arrays import Int64s
from pipeline.stages.schedule.request import Sequence
from pipeline.stages.schedule.row_flags import RowFlag
from pipeline.stages.schedule.rows import RowTracker
from pipeline.stages.schedule.scheduler_config import SchedulerConfig

SHARE = 0.1
NUM_QUICK = 8
LATELY_S = 60.0
MAX_SCOPES = 1024
"""Whose slow masks, and turns, are remembered."""
ROOM = 4
"""Paced rows have one of this many rows and blocks."""


class MaskTurns:
    """Owns the turns. Times are by time.monotonic()."""

    def __init__(self, rows: RowTracker, config: SchedulerConfig) -> None:
        self._rows = rows
        self._max_rows = max(1, config.max_num_rows // ROOM)
        self._max_rows_of_scope = max(1, self._max_rows // 2)
        self._max_blocks = config.num_blocks // ROOM
        self._block_size = config.block_size
        self._next_s = 0.0
        """When the next paced row may run beside others."""
        self._until_s: dict[str, float] = {}
        """By scope: until when its new rows are paced."""
        self._turns: dict[str, int] = {}
        """By scope: the number of its last turn."""
        self._num_turns = 0

    def begins_paced(self, sequence: Sequence, now_s: float) -> bool:
        """Whether a sequence that has no row, and is not paced, will be from its next step."""
        if not (self._until_s and sequence.request.options.compiled_grammar) or sequence.is_paced:
            return False
        return now_s < self._until_s.get(sequence.request.scope_id, 0.0)

    def start(self, sequence: Sequence, now_s: float) -> None:
        """A sequence is about to get a row."""
        if self.begins_paced(sequence, now_s):
            sequence.is_paced, sequence.num_quick_masks = True, 0

    # ------------------------------------------------------------------------------------------------------- places

    def next_of(self, waiting: Iterable[Sequence]) -> Sequence | None:
        """The first of these paced sequences, in order, for which there is a place."""
        paced = self._paced()
        if not len(paced):
            return next(iter(waiting), None)
        if len(paced) >= self._max_rows:
            return None
        by_scope = self._by_scope(paced)
        first = next((one for one in waiting if by_scope[one.request.scope_id] < self._max_rows_of_scope), None)
        if first is None:
            return None
        num_blocks = int(self._rows.num_blocks[paced].sum()) + len(first.ids) // self._block_size + 1
        return first if num_blocks <= self._max_blocks else None

    def beyond(self) -> list[int]:
        """Paced rows that have more than their part of the rows or of the blocks: of the scope that has most, those
        whose turn is last. Beams are left, as they can't be swapped out alone."""
        rows = self._rows
        paced = self._paced()
        num_blocks = int(rows.num_blocks[paced].sum())
        num_left, beyond = len(paced), []
        if num_left <= self._max_rows and num_blocks <= self._max_blocks:
            return []
        by_scope = self._by_scope(paced)
        movable = {row for row in paced.tolist() if not rows.flags[row] & RowFlag.BEAM}
        while movable and num_left > 1 and (num_left > self._max_rows or num_blocks > self._max_blocks):
            row = max(movable, key=lambda one: (by_scope[self._scope_of(one)], self._last_turn(one)))
            movable.remove(row)
            by_scope[self._scope_of(row)] -= 1
            num_left, num_blocks = num_left - 1, num_blocks - int(rows.num_blocks[row])
            beyond.append(row)
        return beyond

    def _paced(self) -> Int64s:
        order = self._rows.order
        paced: Int64s = order[self._rows.have(RowFlag.PACED, order)]
        return paced

    def _by_scope(self, paced: Int64s) -> Counter[str]:
        return Counter(map(self._scope_of, paced.tolist()))

    def _scope_of(self, row: int) -> str:
        sequence = self._rows.sequences[row]
        assert sequence is not None
        return sequence.request.scope_id

    # -------------------------------------------------------------------------------------------------------- turns

    def observe(self, sampled: Int64s, slow_rows: list[int], slow_s: list[float], now_s: float) -> None:
        """A result has come: `sampled` rows that still have their sequence have a mask more, if they have a grammar;
        `slow_rows` are those whose mask was slow, and `slow_s` the seconds that it took."""
        rows, slow = self._rows, dict(zip(slow_rows, slow_s, strict=True))
        for row in sampled.tolist():
            sequence = rows.sequences[row]
            if sequence is None:
                continue
            if (took_s := slow.get(row)) is not None:
                self._next_s = max(self._next_s, now_s) + took_s / SHARE
                self._remember(sequence.request.scope_id, now_s)
                sequence.num_quick_masks = 0
                if not sequence.is_paced:
                    sequence.is_paced = True
                    rows.set_flag(row, RowFlag.PACED, is_set=True)
            elif sequence.is_paced:
                sequence.num_quick_masks += 1
                if sequence.num_quick_masks >= NUM_QUICK:
                    sequence.is_paced = False
                    rows.set_flag(row, RowFlag.PACED, is_set=False)

    def limit(self, order: Int64s, need: Int64s, now_s: float) -> Int64s:
        """What these running rows need, by order, without the paced ones whose turn it is not."""
        is_paced = self._rows.have(RowFlag.PACED, order)
        indices = (is_paced & (need == 1)).nonzero()[0].tolist()
        limited: Int64s = need - (is_paced & (need > 0))  # the last position of a prompt has its turn, too
        if not indices:
            return limited
        if now_s >= self._next_s or is_paced.all():
            index = min(indices, key=lambda one: self._last_turn(int(order[one])))
            limited[index] = 1
            sequence = self._rows.sequences[int(order[index])]
            assert sequence is not None
            self._num_turns += 1
            sequence.last_mask_turn = self._turns[sequence.request.scope_id] = self._num_turns
        return limited

    def _last_turn(self, row: int) -> tuple[int, int]:
        """Of a row's scope, and of its sequence."""
        sequence = self._rows.sequences[row]
        assert sequence is not None
        return self._turns.get(sequence.request.scope_id, 0), sequence.last_mask_turn

    def _remember(self, scope: str, now_s: float) -> None:
        self._until_s[scope] = now_s + LATELY_S
        if len(self._until_s) > MAX_SCOPES:
            self._until_s = {one: until_s for one, until_s in self._until_s.items() if until_s > now_s}
        if len(self._turns) > MAX_SCOPES:
            self._turns = {one: turn for one, turn in self._turns.items() if one in self._until_s}
