"""The short convolutions of a program in the CPU library.

norm ─► b, c and x ─► c * conv(b * x) ─► out ─► residual
"""

import ctypes
from functools import partial

import numpy as np

from pipeline.kernels.step_inputs import IntArray, StepInputs
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cpu.native.layers import NativeLayers
from pipeline.stages.execute.cpu.native.memory import NativeMemory
from pipeline.stages.execute.cpu.native.norms import NativeNorms
from pipeline.stages.execute.cpu.native.ranks import RankMemory
from pipeline.stages.execute.cpu.native.recurrent.slots import NativeSlots
from pipeline.stages.execute.program import RecurrentWeights, ShortConvWeights
from pipeline.stages.execute.ranks.share import Share


class NativeShortConv:
    """Records the layers of one program, and owns the memory between their ops. Ranks have a part of the channels."""

    def __init__(
        self,
        library: ctypes.CDLL,
        program: int,
        memory: NativeMemory,
        config: ModelConfig,
        inputs: StepInputs,
        slots: NativeSlots,
        norms: NativeNorms,
        layers: NativeLayers,
        gathered: RankMemory,
        share: Share,
    ) -> None:
        self._library, self._program, self._memory, self._slots = library, program, memory, slots
        self._inputs, self._norms, self._layers = inputs, norms, layers
        assert config.short_conv is not None
        self._taps, self._width, self._channels = config.short_conv.taps, config.hidden_size, share.hidden
        self._num = 0
        self._in = memory.floats(inputs.max_num_tokens, 3 * len(share.hidden))
        self._out = gathered.rows(inputs.max_num_tokens, config.hidden_size)

    def emit(self, weights: RecurrentWeights) -> None:
        """Record a layer after its norm."""
        assert isinstance(weights, ShortConvWeights)
        memory, channels, width = self._memory, self._channels, self._width
        self._layers.begin()
        own: IntArray = np.arange(channels.start, channels.stop, dtype=np.int32)
        rows = np.concatenate([own, width + own, 2 * width + own])
        products = memory.products(weights.inputs, rows, partial(self._norms.rows, slot=0))
        self._library.program_products(self._program, self._in, products, len(products), len(rows))
        taps = memory.vector(np.asarray(weights.conv)[:, own])
        state = self._slots.state(self._num * (self._taps - 1) * len(own), self._inputs)
        self._num += 1
        written, floats = self._layers.written(self._out, width, weights.out.matrices[0], channels.start)
        self._library.program_short_conv(
            *(self._program, ctypes.byref(state), self._in, taps, len(own), self._taps, written, floats)
        )
        self._layers.barrier("short convolution")
        self._layers.add(self._out, width, weights.out, weights.post_norm, (), "convolution")
