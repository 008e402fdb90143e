"""A step's entries and samples on the host, before it is launched."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.kernels.step_inputs import BLOCK_SIZE, IntArray, LongArray
from pipeline.stages.execute.rows import NOT_YET, RowTable

BoolArray = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True)
class Batch:
    """A step on the host, one value per entry; see `pipeline.kernels.triton.rows.StepArrays`. The last two have one
    value per sample."""

    rows: IntArray
    starts: IntArray
    counts: IntArray
    offsets: IntArray
    num_tokens: int
    sampled: IntArray
    """Tokens to sample an id after."""
    sample_rows: IntArray


NO_INTS: IntArray = np.zeros(0, np.int32)
EMPTY = Batch(NO_INTS, NO_INTS, NO_INTS, NO_INTS, 0, NO_INTS, NO_INTS)


def batch_of(
    rows: IntArray, starts: IntArray, counts: IntArray, is_sampled: BoolArray, num_drafts: LongArray | None
) -> Batch:
    """The batch of these entries. `counts` do not include the `num_drafts` ids that were proposed for each, which
    follow its tokens: an id is sampled after the last token and after each of them."""
    num = len(rows)
    if num_drafts is not None:
        counts = (counts + num_drafts).astype(np.int32)
    num_tokens = int(np.add.reduce(counts))
    offsets = np.arange(num, dtype=np.int32) if num == num_tokens else np.cumsum(counts, dtype=np.int32) - counts
    last = offsets if num == num_tokens else offsets + counts - 1
    if np.count_nonzero(is_sampled) != num:
        last, sample_rows = last[is_sampled], rows[is_sampled]
    else:
        sample_rows = rows
    if num_drafts is not None:
        num_drafts = num_drafts[is_sampled]
        num_each = 1 + num_drafts
        offset = np.arange(int(num_each.sum())) - np.repeat(num_each.cumsum() - num_each, num_each)
        last = (np.repeat(last - num_drafts, num_each) + offset).astype(np.int32)
        sample_rows = np.repeat(sample_rows, num_each)
    return Batch(rows, starts, counts, offsets, num_tokens, last, sample_rows)


def check_plan(table: RowTable, rows: IntArray, starts: IntArray, counts: IntArray, samples: BoolArray) -> None:
    """Check what can be checked without the ids that are still on the GPU, and note that the rows are computed."""
    ends, expected = starts + counts, table.num_computed[rows]
    # Cheap checks for every step; the detailed ones only run if these fail. Viewed as unsigned, negative numbers
    # are too large.
    fine = (expected == starts) & (starts.view(np.uint32) < ends.view(np.uint32))
    fine &= ends <= table.num_blocks[rows] * BLOCK_SIZE
    fine &= ends <= table.max_model_len - samples
    if not fine.all():
        assert table.taken[rows].all(), f"rows computed that are not taken: {rows[~table.taken[rows]]}"
        assert (counts > 0).all() and (starts >= 0).all(), f"entries at {starts} compute {counts}"
        wrong = (expected != NOT_YET) & (expected != starts)
        assert not wrong.any(), f"rows {rows[wrong]} start at {starts[wrong]}, computed are {expected[wrong]}"
        assert (ends <= table.num_blocks[rows] * BLOCK_SIZE).all(), "tokens computed without a block for them"
        assert (ends <= table.max_model_len - samples).all(), "computed or sampled beyond max_model_len"
    table.num_computed[rows] = ends
