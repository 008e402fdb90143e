"""Both ends of a step, and copies of blocks."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pipeline.kernels.triton import copy
from pipeline.kernels.triton import step as ends
from pipeline.kernels.triton.rows import NUM_FIELDS, RowState, StepArrays


def _ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def launches() -> None:
    rows = RowState(_ints(4096), _ints(257, NUM_FIELDS), _ints(257, 4096), _ints(257, 256), _ints(257, 130))
    arrays: list[Any] = [
        *(_ints(256) for _ in range(6)),
        _ints(256, dtype=torch.int64),
        *(_ints(256) for _ in range(3)),
        rows.blocks,
    ]
    step = StepArrays(*arrays)
    words, stamps = _ints(8192), _ints(4)
    ends.apply(rows, words)
    ends.prepare(step, rows, words, stamps, 256, one_each=True)
    ends.prepare(step, rows, words, stamps, 256, one_each=False)
    ends.prepare(replace(step, adapters=_ints(256)), rows, words, stamps, 256, one_each=False)
    for appends in (True, False):
        ends.finish(_ints(4 + 512), _ints(256), step, rows, words, stamps, appends=appends)
    memory, packed = _ints(64, 8, 8192), _ints(4, 64, 8192)
    copy.gather(packed, memory, _ints(4))
    copy.scatter(memory, _ints(4), packed)
    copy.fork(memory, _ints(4), _ints(4))
