"""The layers with a recurrent state of a torch program."""

import torch
from torch import Tensor

from pipeline.kernels.select import Ops
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cpu.pytorch.calls import TorchCalls
from pipeline.stages.execute.cpu.pytorch.delta import TorchDelta
from pipeline.stages.execute.cpu.pytorch.short_conv import TorchShortConv
from pipeline.stages.execute.kv import KVPlan
from pipeline.stages.execute.layers.recurrent import slot_floats


class TorchRecurrent:
    """Owns the slots of states, and has the layers' ops."""

    def __init__(self, ops: Ops, calls: TorchCalls, config: ModelConfig, kv: KVPlan) -> None:
        self._slots = torch.zeros(kv.num_state_slots, kv.slot_bytes // 4 or slot_floats(config))
        make = TorchDelta if config.short_conv is None else TorchShortConv
        self.layers: TorchDelta | TorchShortConv = make(ops, calls, config, self._slots)

    def copy(self, swapped: Tensor, sources: list[int], targets: list[int]) -> None:
        """Copy slots, in order. Ids from their number on are those of `swapped`."""
        num = len(self._slots)
        for source, target in zip(sources, targets, strict=True):
            slot = swapped[target - num] if target >= num else self._slots[target]
            slot.copy_(swapped[source - num] if source >= num else self._slots[source])
