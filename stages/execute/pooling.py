"""Embeddings: pools the hidden states of a prompt's tokens, after the last norm, into one vector.

Vectors are not normalized here. Shapes: T tokens, H hidden_size.
"""

from typing import Any

import numpy as np

from pipeline.kernels.sampling.logprob_inputs import FloatArray
from pipeline.runtime.messages import Pooling
from pipeline.runtime.model.model_config import NormKind

DoubleArray = np.ndarray[Any, np.dtype[np.float64]]

SLICE = 64
"""Tokens that are converted to float64 at a time."""


class Pool:
    """Partial sums of each row's prompt, in float64 and token by token, so that results do not depend on chunks."""

    def __init__(self, weight: FloatArray, eps: float, bias: FloatArray | None = None, kind: NormKind = "rms") -> None:
        """`weight` [H], `bias` [H], `eps` and `kind` are the last norm's."""
        self._weight: DoubleArray = weight.astype(np.float64)
        self._bias: DoubleArray | None = None if bias is None else bias.astype(np.float64)
        self._eps, self._centers = eps, kind == "layer"
        self._sums: dict[int, DoubleArray] = {}

    def add(self, row: int, start: int, residual: FloatArray) -> None:
        """A row's tokens from position `start` on, before the last norm: [T, H]. Position 0 starts a new sum."""
        if start == 0:
            self._sums[row] = np.zeros(residual.shape[1])
        assert row in self._sums, f"row {row} is pooled from position {start}, not from 0"
        for begin in range(0, len(residual), SLICE):
            states = self._states(residual[begin : begin + SLICE])
            # numpy adds the rows one after the other, so the result does not depend on slices.
            self._sums[row] = np.add.reduce(np.vstack((self._sums[row], states)), axis=0)

    def take(self, row: int, pooling: Pooling, num_tokens: int, last: FloatArray) -> FloatArray:
        """The embedding [H] of a row that has been added whole; `last` [H] is its last token, as above."""
        total = self._sums.pop(row)
        vector = total / num_tokens if pooling == Pooling.MEAN else self._states(last[None])[0]
        embedding: FloatArray = vector.astype(np.float32)
        return embedding

    def drop(self, row: int) -> None:
        """Forget a dropped row."""
        self._sums.pop(row, None)

    def _states(self, residual: FloatArray) -> DoubleArray:
        wide = residual.astype(np.float64)
        if self._centers:
            wide = wide - wide.mean(-1, keepdims=True)
        states: DoubleArray = wide / np.sqrt(np.square(wide).mean(-1, keepdims=True) + self._eps) * self._weight
        if self._bias is not None:
            states += self._bias
        return states
