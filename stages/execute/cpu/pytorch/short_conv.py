"""The short convolutions of a torch program: the reference for kernels/cpu/short_conv.h."""

import torch

from pipeline.kernels.matrix import as_tensor
from pipeline.kernels.select import Ops
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cpu.pytorch.calls import TorchCalls
from pipeline.stages.execute.program import RecurrentWeights, ShortConvWeights


class TorchShortConv:
    """Owns the memory before and after the layers' ops."""

    def __init__(self, ops: Ops, calls: TorchCalls, config: ModelConfig, slots: torch.Tensor) -> None:
        self._ops, self._calls, self._slots = ops, calls, slots
        self._floats = 0
        """Of the layers so far in a slot."""
        self.inputs = calls.buffer(3 * config.hidden_size, dtype=torch.float32)
        """Of the layer's matrices."""
        self.out = calls.buffer(config.hidden_size)

    def record(self, weights: RecurrentWeights) -> None:
        """Record what is between a layer's matmuls."""
        assert isinstance(weights, ShortConvWeights)
        taps = as_tensor(weights.conv)
        self._calls.add(
            self._ops.short_conv, self.out, self.inputs, self._slots, self._calls.inputs, taps, self._floats
        )
        self._floats += (len(taps) - 1) * taps.shape[1]
