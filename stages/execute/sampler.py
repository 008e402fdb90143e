"""From logits to ids: greedy rows by their largest logit, the others by a draw whose noise is keyed to the row."""

import numpy as np
import torch
from torch import Tensor

from pipeline.kernels.noise import draw_keys
from pipeline.kernels.select import Ops
from pipeline.kernels.step_inputs import IntArray
from pipeline.stages.execute.rows import RowTable

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy; dividing by it would leave one candidate anyway."""


class Sampler:
    """Draws for any mix of rows; a batch that is all greedy costs one argmax."""

    def __init__(self, ops: Ops, rows: RowTable) -> None:
        self._ops = ops
        self._rows = rows

    def sample(self, logits: Tensor, rows: IntArray) -> IntArray:
        """The next id of each of `rows`: logits [N, V], one row of them each. Returns [N] int32.

        The noise of a draw comes from the sequence's key and the position that the id will have, so it is the same
        whichever step and batch the draw is in.
        """
        random = np.flatnonzero(self._rows.temperature[rows] >= GREEDY_BELOW)
        if not len(random):
            return self._ops.argmax(logits).numpy().astype(np.int32)
        ids = np.empty(len(rows), np.int32)
        greedy = np.flatnonzero(self._rows.temperature[rows] < GREEDY_BELOW)
        if len(greedy):
            ids[greedy] = self._ops.argmax(logits[torch.from_numpy(greedy)]).numpy()
            logits = logits[torch.from_numpy(random)]
        drawn = rows[random]
        ids[random] = self._ops.sample(
            logits,
            torch.from_numpy(self._rows.temperature[drawn]),
            torch.from_numpy(self._rows.top_k[drawn]),
            torch.from_numpy(self._rows.top_p[drawn]),
            torch.from_numpy(self._rows.min_p[drawn]),
            draw_keys(self._rows.keys[drawn], self._rows.num_ids[drawn]),
        ).numpy()
        return ids
