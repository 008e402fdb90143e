"""The gated DeltaNet layers of a torch program: the reference for kernels/cpu/delta.h."""

import torch
from torch import Tensor

from pipeline.kernels.matrix import as_tensor
from pipeline.kernels.recurrent.delta import DeltaOptions, DeltaVectors
from pipeline.kernels.select import Ops
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cpu.pytorch.calls import TorchCalls
from pipeline.stages.execute.layers.delta import delta_shape
from pipeline.stages.execute.program import DeltaWeights, RecurrentWeights


class TorchDelta:
    """Owns the memory before and after the layers' ops."""

    def __init__(self, ops: Ops, calls: TorchCalls, config: ModelConfig, slots: Tensor) -> None:
        self._ops, self._calls, self._config, self._slots = ops, calls, config, slots
        self._shape = shape = delta_shape(config)
        self._num_layers = 0
        self.inputs = calls.buffer(shape.inputs, dtype=torch.float32)
        """Of the layer's matrices."""
        self.out = calls.buffer(shape.values)

    def record(self, weights: RecurrentWeights) -> None:
        """Record what is between a layer's matmuls."""
        assert isinstance(weights, DeltaWeights)
        delta, shape = self._config.delta, self._shape
        assert delta is not None
        vectors = weights.conv, weights.rates, weights.dt_bias, weights.head_norm
        options = DeltaOptions(shape, delta.eps, delta.beta, self._num_layers * shape.slot)
        self._num_layers += 1
        made = DeltaVectors(*(as_tensor(vector) for vector in vectors))
        self._calls.add(self._ops.delta_rule, self.out, self.inputs, self._slots, self._calls.inputs, made, options)
