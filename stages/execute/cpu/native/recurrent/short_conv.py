"""The short convolutions of a program in the CPU library.

norm ─► b, c and x ─► c * conv(b * x) ─► out ─► residual
"""

import ctypes
from functools import partial

import numpy as np

from pipeline.kernels.step_inputs import IntArray
from pipeline.stages.execute.cpu.native.recurrent.parts import NativeRecurrent, RecurrentParts
from pipeline.stages.execute.program import RecurrentWeights, ShortConvWeights


class NativeShortConv(NativeRecurrent):
    """Ranks have a part of the channels."""

    def __init__(self, parts: RecurrentParts) -> None:
        super().__init__(parts)
        config, share, num = parts.config, parts.share, parts.inputs.max_num_tokens
        assert config.short_conv is not None
        self._taps, self._width, self._channels = config.short_conv.taps, config.hidden_size, share.hidden
        self._in = parts.memory.floats(num, 3 * len(share.hidden))
        self._out = parts.gathered.rows(num, config.hidden_size)

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
