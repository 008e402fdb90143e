"""Rows whose grammar masks are slow run in turns, so that these masks take at most SHARE of the time.

A step waits for the masks of all its rows. A client's grammar may be made so that each of its masks takes a tenth of a
second, and some of them would hold up every other row at every step.

    a slow mask ──► its row is paced: one paced row in a step, and none before the last slow mask's time / SHARE is over
                      └── NUM_QUICK masks that are not slow ──► no more

Without rows that are not paced, one paced row runs in each step. Prompts wait only for their last position. New rows
with a grammar are paced from their first step while their scope has had slow masks lately, so that requests of a few
tokens gain nothing.
"""

from pipeline.stages.schedule.arrays import Int64s
from pipeline.stages.schedule.request import Sequence
from pipeline.stages.schedule.row_flags import RowFlag
from pipeline.stages.schedule.rows import RowTracker

SHARE = 0.1
NUM_QUICK = 8
LATELY_S = 60.0
MAX_SCOPES = 1024
"""Whose slow masks, and turns, are remembered."""


class MaskTurns:
    """Owns the turns. Times are by time.monotonic()."""

    def __init__(self, rows: RowTracker) -> None:
        self._rows = rows
        self._next_s = 0.0
        """When the next paced row may run beside others."""
        self._until_s: dict[str, float] = {}
        """By scope: until when its new rows are paced."""
        self._turns: dict[str, int] = {}
        """By scope: the number of its last turn."""
        self._num_turns = 0

    def start(self, sequence: Sequence, now_s: float) -> None:
        """A sequence is about to get a row."""
        request = sequence.request
        if self._until_s and request.options.compiled_grammar and not sequence.is_paced:
            sequence.is_paced = now_s < self._until_s.get(request.scope_id, 0.0)
            sequence.num_quick_masks = 0

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
