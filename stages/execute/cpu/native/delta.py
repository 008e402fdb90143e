"""The gated DeltaNet layers of a program in the CPU library.

norm ─► queries, keys, values, z, b, a ─► gated delta rule ─► out ─► residual
"""

import ctypes
from functools import partial

import numpy as np

from pipeline.kernels.cpu import native
from pipeline.kernels.cpu.native import ActivationForm
from pipeline.kernels.step_inputs import StepInputs
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cpu.native.layers import NativeLayers
from pipeline.stages.execute.cpu.native.memory import NativeMemory, rows_of
from pipeline.stages.execute.cpu.native.norms import NativeNorms
from pipeline.stages.execute.kv import KVPlan, SwapArray
from pipeline.stages.execute.layers.delta import delta_shape, slot_floats
from pipeline.stages.execute.program import DeltaWeights


class NativeDelta:
    """Records the recurrent layers of one program, and owns the slots of states and the memory between their ops."""

    def __init__(
        self,
        library: ctypes.CDLL,
        program: int,
        memory: NativeMemory,
        config: ModelConfig,
        inputs: StepInputs,
        kv: KVPlan,
        norms: NativeNorms,
        layers: NativeLayers,
    ) -> None:
        self._library, self._program, self._memory, self._config = library, program, memory, config
        self._inputs, self._norms, self._layers = inputs, norms, layers
        self._shape = shape = delta_shape(config)
        self._num = 0
        num, self._num_slots = inputs.max_num_tokens, kv.num_state_slots
        self.slot = kv.slot_bytes // 4 or slot_floats(config)
        self.slots = memory.floats(kv.num_state_slots, self.slot)
        """The address of float32 [slots, `slot`]."""
        self._addresses = np.array([self.slots], np.uint64)
        self._in = memory.floats(num, shape.inputs)
        self._conv = memory.floats(num, shape.channels)
        self._gates = memory.floats(num, 2 * shape.value_heads)
        self._values = memory.floats(num, shape.values)
        self._out = memory.rows(num, shape.values)

    def blocks(self, swapped: SwapArray) -> native.NativeBlocks:
        """The addresses of the slots, and of those in swap space, for copies."""
        return native.NativeBlocks(
            layers=self._addresses.ctypes.data,
            swap=swapped.ctypes.data,
            num_layers=1,
            num_blocks=self._num_slots,
            layer_bytes=4 * self.slot,
        )

    def emit(self, weights: DeltaWeights) -> None:
        """Record a layer after its norm."""
        config, library, memory, shape = self._config, self._library, self._memory, self._shape
        delta = config.delta
        assert delta is not None
        self._layers.begin()
        products = memory.products(weights.inputs, rows_of(range(shape.inputs)), partial(self._norms.rows, slot=0))
        library.program_products(self._program, self._in, products, len(products), shape.inputs)
        vectors = weights.conv, weights.rates, weights.dt_bias, weights.head_norm
        sizes = shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim, shape.tiled
        layer = native.NativeDeltaLayer(*sizes, delta.beta, delta.eps, *(memory.vector(vector) for vector in vectors))
        state = native.NativeDeltaState(
            *(self.slots, self.slot, self._num * shape.slot),
            *(self._inputs.state_reads.ctypes.data, self._inputs.state_writes.ctypes.data),
        )
        self._num += 1
        form: ActivationForm = memory.form(weights.out.matrices[0])
        library.program_delta(
            *(self._program, ctypes.byref(layer), ctypes.byref(state), self._in, self._conv, self._gates),
            *(self._values, self._out, form),
        )
        self._layers.add(self._out, shape.values, weights.out, None, (), "delta", is_written=True)
