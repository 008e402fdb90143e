"""Builds step messages without a scheduler, for checking and measuring.

It does not import torch, because some callers must set torch's thread count first.
"""

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from pipeline.runtime import messages as m

Entry = tuple[int, int, int, bool]
"""Row, start, count, whether it is sampled."""

GREEDY = m.GenerationOptions(temperature=0.0, ignore_eos=True)


def row_add(row: int, ids: Sequence[int], blocks: Sequence[int], options: m.GenerationOptions = GREEDY) -> m.RowAdd:
    """A message that adds a sequence, with all blocks that it will ever need."""
    return m.RowAdd(
        row=row,
        generation=1,
        index=0,
        ids=i32(ids),
        num_prompt=len(ids),
        blocks=i32(blocks),
        options=msgspec.Raw(msgspec.msgpack.encode(options)),
    )


def step(
    entries: Sequence[Entry] = (),
    adds: Sequence[m.RowAdd] = (),
    drops: Sequence[int] = (),
    drafts: Sequence[int] = (),
    states: Sequence[tuple[int, int]] = (),
) -> m.Step:
    """One step's message. `drafts`: for each entry, how many ids may be proposed for it; none without. `states`: the
    slots that it reads and writes, of a model with recurrent layers."""
    return m.Step(
        incarnation=1,
        step_id=0,
        drops=i32(drops),
        adds=list(adds),
        block_rows=b"",
        block_ids=b"",
        rows=i32([entry[0] for entry in entries]),
        starts=i32([entry[1] for entry in entries]),
        counts=i32([entry[2] for entry in entries]),
        samples=np.array([entry[3] for entry in entries], np.uint8).tobytes(),
        drafts=i32(drafts),
        state_reads=i32([read for read, _ in states]),
        state_writes=i32([write for _, write in states]),
    )


def take(array: Any, dtype: Any) -> "np.ndarray[Any, Any]":
    """An array of a message as numpy array; `Take` without shared memory."""
    assert isinstance(array, bytes)
    return np.frombuffer(array, dtype).copy()


def i32(values: Sequence[int]) -> bytes:
    return np.array(values, np.int32).tobytes()


def num_blocks(num_tokens: int) -> int:
    """Blocks of `num_tokens` tokens of a row."""
    from pipeline.kernels.step_inputs import BLOCK_SIZE

    return math.ceil(num_tokens / BLOCK_SIZE)
