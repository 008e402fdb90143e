"""The layers after the pooling: Dense modules of sentence-transformers, and heads of classifiers.

numpy multiplies one vector at a time, in float32: a vector has the same bits alone and in any batch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.errors import UserError
from pipeline.kernels.sampling.logprob_inputs import FloatArray
from pipeline.runtime.model.pooler import HEAD_FILE, HeadActivation, HeadLayer, Pooler
from pipeline.stages.execute.weights import TensorFile

_erf = np.frompyfunc(math.erf, 1, 1)
ACTIVATIONS: dict[HeadActivation, Callable[[FloatArray], FloatArray]] = {
    "identity": lambda x: x,
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: (0.5 * x * (1 + _erf(x / math.sqrt(2)).astype(np.float64))).astype(np.float32),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + np.exp(-x)),
}


@dataclass(frozen=True, slots=True)
class _Layer:
    form: HeadLayer
    weight: FloatArray
    """[num_outputs, num_inputs]"""
    bias: FloatArray | None
    norm: FloatArray | None
    norm_bias: FloatArray | None

    def apply(self, x: FloatArray) -> FloatArray:
        out: FloatArray = self.weight @ x
        if self.bias is not None:
            out += self.bias
        out = ACTIVATIONS[self.form.activation](out)
        if self.norm is not None:
            centered = out - out.mean(dtype=np.float64)
            out = (centered / np.sqrt(np.square(centered).mean() + self.form.norm_eps) * self.norm).astype(np.float32)
        if self.norm_bias is not None:
            out += self.norm_bias
        return out


class PoolerHead:
    """The layers of a model's `Pooler`."""

    def __init__(self, folder: Path, pooler: Pooler) -> None:
        """Reads them from a prepared folder. Raises UserError if the file has other tensors than model.json says."""
        path = folder / HEAD_FILE
        try:
            file = TensorFile(path)
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read: {error}; prepare the model again") from error

        def tensor(name: str, *shape: int) -> FloatArray:
            entry = file.entries.get(name)
            if entry is None or entry.dtype != "F32" or entry.shape != shape:
                raise UserError(f"{path}: tensor {name!r} is not F32 {list(shape)}: prepare the model again")
            return file.array(name, np.dtype("<f4"))

        self._layers = [
            _Layer(
                layer,
                tensor(f"{i}.weight", layer.num_outputs, layer.num_inputs),
                tensor(f"{i}.bias", layer.num_outputs) if layer.bias else None,
                tensor(f"{i}.norm.weight", layer.num_outputs) if layer.norm else None,
                tensor(f"{i}.norm.bias", layer.num_outputs) if layer.norm_bias else None,
            )
            for i, layer in enumerate(pooler.layers)
        ]

    @staticmethod
    def of(folder: Path, pooler: Pooler | None) -> "PoolerHead | None":
        """The layers of a prepared model; None if it has none."""
        return PoolerHead(folder, pooler) if pooler is not None and pooler.layers else None

    def apply(self, vector: FloatArray) -> FloatArray:
        """Of one pooled vector: float32 [hidden_size] to [width]."""
        for layer in self._layers:
            vector = layer.apply(vector)
        return vector
