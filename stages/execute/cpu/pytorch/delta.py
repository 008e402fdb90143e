"""The gated DeltaNet layers of a torch program: the reference for kernels/cpu/delta.h."""

import torch
from torch import Tensor

from pipeline.kernels.delta import DeltaOptions, DeltaVectors
from pipeline.kernels.matrix import as_tensor
from pipeline.kernels.select import Ops
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cpu.pytorch.calls import TorchCalls
from pipeline.stages.execute.kv import KVPlan
from pipeline.stages.execute.layers.delta import delta_shape, slot_floats
from pipeline.stages.execute.program import DeltaWeights


class TorchDelta:
    """Owns the slots of states, and the memory before and after the layers' ops."""

    def __init__(self, ops: Ops, calls: TorchCalls, config: ModelConfig, kv: KVPlan) -> None:
        self._ops, self._calls, self._config = ops, calls, config
        self._shape = shape = delta_shape(config)
        self._slots = torch.zeros(kv.num_state_slots, kv.slot_bytes // 4 or slot_floats(config))
        self._num_layers = 0
        self.inputs = calls.buffer(shape.inputs, dtype=torch.float32)
        """Of the layer's matrices."""
        self.out = calls.buffer(shape.values)

    def copy(self, swapped: Tensor, sources: list[int], targets: list[int]) -> None:
        """Copy slots, in order. Ids from their number on are those of `swapped`."""
        num = len(self._slots)
        for source, target in zip(sources, targets, strict=True):
            slot = swapped[target - num] if target >= num else self._slots[target]
            slot.copy_(swapped[source - num] if source >= num else self._slots[source])

    def record(self, weights: DeltaWeights) -> None:
        """Record what is between a layer's matmuls."""
        delta, shape = self._config.delta, self._shape
        assert delta is not None
        vectors = weights.conv, weights.rates, weights.dt_bias, weights.head_norm
        options = DeltaOptions(shape, delta.eps, delta.beta, self._num_layers * shape.slot)
        self._num_layers += 1
        made = DeltaVectors(*(as_tensor(vector) for vector in vectors))
        self._calls.add(self._ops.delta_rule, self.out, self.inputs, self._slots, self._calls.inputs, made, options)
