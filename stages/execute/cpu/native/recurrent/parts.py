"""What records the recurrent layers of a program in the CPU library."""

import ctypes
from typing import NamedTuple

from pipeline.kernels.step_inputs import StepInputs
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cpu.native.layers import NativeLayers
from pipeline.stages.execute.cpu.native.memory import NativeMemory
from pipeline.stages.execute.cpu.native.norms import NativeNorms
from pipeline.stages.execute.cpu.native.ranks import RankMemory
from pipeline.stages.execute.cpu.native.recurrent.slots import NativeSlots
from pipeline.stages.execute.ranks.share import Share


class RecurrentParts(NamedTuple):
    """The parts of one program that its recurrent layers use."""

    library: ctypes.CDLL
    program: int
    memory: NativeMemory
    config: ModelConfig
    inputs: StepInputs
    slots: NativeSlots
    norms: NativeNorms
    layers: NativeLayers
    gathered: RankMemory
    share: Share


class NativeRecurrent:
    """Records the layers of one program, and owns the memory between their ops."""

    def __init__(self, parts: RecurrentParts) -> None:
        self._library, self._program, self._memory, self._slots = (
            parts.library,
            parts.program,
            parts.memory,
            parts.slots,
        )
        self._inputs, self._norms, self._layers = parts.inputs, parts.norms, parts.layers
        self._num = 0
        """Of the layers that are recorded."""
