"""A run of steps in which the same rows decode. Each differs from the one before by a position, and by a block for rows
whose last one is full, so its plan, result and output are made without looking at each row. Nearly all steps without
prompts are like that.

    plan ──► repeat ──► repeat ──► … ──► plan again: a row starts, ends, or is about to get its last id
"""

import numpy as np

from pipeline.shm.arrays import INLINE_BYTES
from pipeline.stages.schedule.arrays import NO_ROWS, Int32s, Int64s
from pipeline.stages.schedule.rows import RowTracker

MAX_ROWS = INLINE_BYTES // 8
"""Of a run: its messages contain the arrays, 8 bytes a row at most."""


class DecodeRun:
    """The rows of the last plan, and what the messages about them have in common. Valid while `num_changes` is that of
    the row tracker."""

    __slots__ = (
        "_block_size",
        "_rows",
        "_until_block",
        "counts",
        "finishes",
        "ids",
        "index",
        "num_changes",
        "num_left",
        "num_prompt",
        "num_rows",
        "order",
        "row_ids",
        "samples",
        "seqs",
        "starts",
    )

    def __init__(self, rows: RowTracker, order: Int64s, ends: Int64s, block_size: int) -> None:
        """Each row in `order` computes one position in the last plan, up to `ends`, and samples an id."""
        self._rows = rows
        self._block_size = block_size
        self.num_changes = rows.num_changes
        self.order = order
        self.num_rows = num = len(order)
        first = int(order[0])
        is_adjacent = np.count_nonzero(order == np.arange(first, first + num)) == num
        self.index: Int64s | slice = slice(first, first + num) if is_adjacent else order
        """Selects the rows; a slice is much cheaper than an array."""
        self.num_left = int(np.minimum.reduce(rows.max_num_tokens[order] - ends - 2))
        """Steps that can follow without the last id of any row."""
        self.starts: Int32s = ends.astype(np.int32)
        """Of the next step."""
        self._until_block = self._fewest_until_block()
        """Steps that can follow without a new block."""
        self.num_prompt = rows.num_prompt[order]
        self.row_ids = order.astype(np.int32).tobytes()
        self.counts = np.ones(num, np.int32).tobytes()
        self.samples = np.ones(num, np.uint8).tobytes()
        self.finishes = bytes(num)
        self.seqs = rows.seq[order].tobytes()
        self.ids = b""
        """int32; those of the last step of the run that was settled. The step that begins a run is not one of these,
        because it may sample the first id of a sequence."""

    @property
    def is_valid(self) -> bool:
        """Whether the same sequences run as in the last plan."""
        return self.num_changes == self._rows.num_changes

    @property
    def context(self) -> int:
        """Positions that the next step attends to."""
        return int(np.add.reduce(self.starts)) + self.num_rows

    def full_rows(self) -> Int64s:
        """The rows that need a block for the next step; none in most steps of few rows."""
        if self._until_block > 0:
            return NO_ROWS
        return self.order[self._rows.num_blocks[self.index] * self._block_size <= self.starts]

    def repeat(self) -> None:
        """One more step is planned, and all rows have the blocks for it."""
        rows = self._rows
        if self._until_block <= 0:
            self._until_block = self._fewest_until_block()
        self._until_block -= 1
        rows.num_computed_tokens[self.index] += 1
        rows.num_output_placeholders[self.index] += 1
        self.starts += 1
        self.num_left -= 1

    def _fewest_until_block(self) -> int:
        return int(np.minimum.reduce(self._rows.num_blocks[self.index] * self._block_size - self.starts))

    def settle(self, ids: bytes) -> Int64s:
        """Append the ids of a step of the run, which ends no sequence. Returns the number of ids that each row has."""
        rows, index, sampled = self._rows, self.index, np.frombuffer(ids, np.int32)
        assert np.count_nonzero(sampled < 0) == 0, "there is no id for a running row"
        rows.ids[self.order, rows.num_tokens[index]] = sampled
        rows.num_tokens[index] += 1
        rows.num_output_placeholders[index] -= 1
        self.ids = ids
        return rows.num_tokens[index]
