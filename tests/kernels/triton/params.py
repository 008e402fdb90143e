"""Rows' parameters as the GPU has them, from what a test wants to be different."""

from dataclasses import dataclass

import numpy as np
import torch

from pipeline.kernels.noise import sequence_key
from pipeline.kernels.triton.rows import NUM_FIELDS, Field


@dataclass(frozen=True)
class Row:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 1
    num_ids: int = 9
    ended: bool = False

    @property
    def key(self) -> int:
        return sequence_key(self.seed, 0)


def params_of(rows: list[Row]) -> torch.Tensor:
    """[R, NUM_FIELDS] int32; one row more than are given, which is nobody's."""
    params = np.zeros((len(rows) + 1, NUM_FIELDS), np.int32)
    floats = params.view(np.float32)
    params[:, Field.NUM_TOP] = params[:, Field.ALLOWED_AT] = -1
    for i, row in enumerate(rows):
        params[i, Field.NUM_IDS], params[i, Field.ENDED] = row.num_ids, row.ended
        params[i, Field.TOP_K] = row.top_k
        params[i, [Field.KEY_LOW, Field.KEY_HIGH]] = np.array([row.key], np.uint64).view(np.int32)
        floats[i, Field.TEMPERATURE], floats[i, Field.TOP_P], floats[i, Field.MIN_P] = (
            row.temperature,
            row.top_p,
            row.min_p,
        )
    params[-1, Field.ENDED] = 1
    return torch.from_numpy(params)
