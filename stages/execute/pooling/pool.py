"""Embeddings and logits of labels: pools the hidden states of a prompt's tokens, after the last norm, and applies the
model's layers after that (stages/execute/pooling/head.py).

Embeddings are not normalized here, nor are logits activated. Shapes: T tokens, H hidden_size.
"""

from typing import Any

import numpy as np

from pipeline.kernels.sampling.logprob_inputs import FloatArray
from pipeline.runtime.messages import Pooling
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.pooling.head import PoolerHead
from pipeline.stages.execute.program import Norm

DoubleArray = np.ndarray[Any, np.dtype[np.float64]]

SLICE = 64
"""Tokens that are converted to float64 at a time."""


class Pool:
    """Partial results of each row's prompt, in float64 and token by token, so that results do not depend on chunks."""

    def __init__(self, config: ModelConfig, norm: Norm | None, head: PoolerHead | None = None) -> None:
        """`norm` is the last norm; None if the hidden states are normed already. `head` is None if there are no layers
        after the pooling."""
        self._eps, self._centers = config.rms_norm_eps, config.norm == "layer"
        self._weight: DoubleArray | None = None if norm is None else np.asarray(norm.weight, np.float64)
        self._bias = None if norm is None or norm.bias is None else np.asarray(norm.bias, np.float64)
        self._head = head
        self._pooled: dict[int, DoubleArray] = {}
        """By row; [H], or with the pooling ALL [T, H]."""

    def add(self, row: int, pooling: Pooling, start: int, residual: FloatArray) -> None:
        """A row's tokens from position `start` on, before the last norm: [T, H]. Position 0 starts a new row; with the
        pooling LAST, earlier positions may have come from the prefix cache."""
        if pooling == Pooling.LAST:
            return
        if start == 0:
            self._pooled[row] = _nothing(pooling, residual.shape[1])
        assert row in self._pooled, f"row {row} is pooled from position {start}, not from 0"
        if pooling == Pooling.CLS and start:
            return
        if pooling == Pooling.CLS:
            residual = residual[:1]
        for begin in range(0, len(residual), SLICE):
            states = self._states(residual[begin : begin + SLICE])
            self._pooled[row] = _with(self._pooled[row], states, pooling, start + begin)

    def take(self, row: int, pooling: Pooling, num_tokens: int, last: FloatArray) -> FloatArray:
        """The result of a row that has been added whole: a vector, or with the pooling ALL one for each token; `last`
        [H] is its last token, as above."""
        total = self._states(last[None])[0] if pooling == Pooling.LAST else self._pooled.pop(row)
        match pooling:
            case Pooling.MEAN:
                total = total / num_tokens
            case Pooling.MEAN_SQRT_LEN:
                total = total / np.sqrt(num_tokens)
            case Pooling.WEIGHTED_MEAN:
                total = total / (num_tokens * (num_tokens + 1) / 2)
        vector: FloatArray = total.astype(np.float32)
        if self._head is None:
            return vector
        if pooling == Pooling.ALL:  # one by one: the bits of a product of matrices would depend on their number
            return np.stack([self._head.apply(state) for state in vector])
        return self._head.apply(vector)

    def drop(self, row: int) -> None:
        """Forget a dropped row."""
        self._pooled.pop(row, None)

    def partial(self) -> dict[int, tuple[list[int], bytes]]:
        """The partial results by row, for the next executor: shapes, and float64 in bytes."""
        return {row: (list(pooled.shape), pooled.tobytes()) for row, pooled in self._pooled.items()}

    def put_back(self, partial: dict[int, tuple[list[int], bytes]]) -> None:
        """Go on with the `partial` results of the executor before."""
        for row, (shape, data) in partial.items():
            self._pooled[row] = np.frombuffer(data, np.float64).reshape(shape).copy()

    def _states(self, residual: FloatArray) -> DoubleArray:
        wide: DoubleArray = residual.astype(np.float64)
        if self._weight is None:
            return wide
        if self._centers:
            wide = wide - wide.mean(-1, keepdims=True)
        states: DoubleArray = wide / np.sqrt(np.square(wide).mean(-1, keepdims=True) + self._eps) * self._weight
        if self._bias is not None:
            states += self._bias
        return states


def _nothing(pooling: Pooling, width: int) -> DoubleArray:
    if pooling == Pooling.ALL:
        return np.zeros((0, width))
    return np.full(width, -np.inf if pooling == Pooling.MAX else 0.0)


def _with(before: DoubleArray, states: DoubleArray, pooling: Pooling, start: int) -> DoubleArray:
    """A partial result and the states of the next tokens, from position `start` on."""
    rows: DoubleArray = np.vstack((before, states))
    if pooling == Pooling.ALL:
        return rows
    if pooling == Pooling.WEIGHTED_MEAN:
        rows[1:] *= np.arange(start + 1, start + 1 + len(states), dtype=np.float64)[:, None]
    # numpy adds the rows one after the other, so the result does not depend on slices.
    made: DoubleArray = (np.maximum if pooling == Pooling.MAX else np.add).reduce(rows, axis=0)
    return made
