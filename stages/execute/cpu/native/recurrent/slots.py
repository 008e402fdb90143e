"""The slots of states of a program in the CPU library."""

import numpy as np

from pipeline.kernels.cpu import native
from pipeline.kernels.step_inputs import StepInputs
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cpu.native.memory import NativeMemory
from pipeline.stages.execute.kv import KVPlan, SwapArray
from pipeline.stages.execute.layers.recurrent import slot_floats


class NativeSlots:
    """Owns the slots, each with the states of all recurrent layers of a row."""

    def __init__(self, memory: NativeMemory, config: ModelConfig, kv: KVPlan) -> None:
        self._num, self._floats = kv.num_state_slots, kv.slot_bytes // 4 or slot_floats(config)
        self._address = memory.floats(self._num, self._floats)
        self._addresses = np.array([self._address], np.uint64)

    def state(self, layer: int, inputs: StepInputs) -> native.NativeRowStates:
        """The states of a layer that begins at float `layer` of a slot, as a step's entries read and write them."""
        return native.NativeRowStates(
            *(self._address, self._floats, layer),
            *(inputs.state_reads.ctypes.data, inputs.state_writes.ctypes.data),
        )

    def blocks(self, swapped: SwapArray) -> native.NativeBlocks:
        """The addresses of the slots, and of those in swap space, for copies."""
        return native.NativeBlocks(
            layers=self._addresses.ctypes.data,
            swap=swapped.ctypes.data,
            num_layers=1,
            num_blocks=self._num,
            layer_bytes=4 * self._floats,
        )
