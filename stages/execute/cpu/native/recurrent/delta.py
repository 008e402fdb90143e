"""The gated DeltaNet layers of a program in the CPU library.

norm ─► queries, keys, values, z, b, a ─► gated delta rule ─► out ─► residual
"""

import ctypes
from collections.abc import Iterable
from functools import partial

import numpy as np

from pipeline.kernels.cpu import native
from pipeline.kernels.cpu.native import ActivationForm
from pipeline.kernels.step_inputs import IntArray
from pipeline.stages.execute.cpu.native.recurrent.parts import NativeRecurrent, RecurrentParts
from pipeline.stages.execute.layers.delta import delta_shape
from pipeline.stages.execute.program import DeltaWeights, RecurrentWeights
from pipeline.stages.execute.ranks.share import value_heads_of


class NativeDelta(NativeRecurrent):
    def __init__(self, parts: RecurrentParts) -> None:
        super().__init__(parts)
        config, share, memory, num = parts.config, parts.share, parts.memory, parts.inputs.max_num_tokens
        assert config.delta is not None
        self._delta, self._share = config.delta, share
        self._heads = np.array(value_heads_of(config.delta, share.delta_keys), np.int32)
        """The value heads, of all heads of the model."""
        self._shape = shape = delta_shape(config, len(share.delta_keys))
        self._in = memory.floats(num, shape.inputs)
        self._conv = memory.floats(num, shape.channels)
        self._gates = memory.floats(num, 2 * shape.value_heads)
        self._values = memory.floats(num, shape.values)
        self._width = config.delta.value_heads * config.delta.value_dim
        self._out = parts.gathered.rows(num, self._width)

    def emit(self, weights: RecurrentWeights) -> None:
        """Record a layer after its norm."""
        assert isinstance(weights, DeltaWeights)
        library, memory, shape, delta = self._library, self._memory, self._shape, self._delta
        self._layers.begin()
        channels, rows = self._order()
        products = memory.products(weights.inputs, rows, partial(self._norms.rows, slot=0))
        library.program_products(self._program, self._in, products, len(products), shape.inputs)
        of_heads = (np.asarray(vector)[self._heads] for vector in (weights.rates, weights.dt_bias))
        vectors = np.asarray(weights.conv)[:, channels], *of_heads, weights.head_norm
        sizes = shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim, shape.tiled
        layer = native.NativeDeltaLayer(
            *(*sizes, delta.beta, delta.eps, *(memory.vector(vector) for vector in vectors)),
            *(self._heads.ctypes.data, delta.value_heads),
        )
        state = self._slots.state(self._num * shape.slot, self._inputs)
        self._num += 1
        form: ActivationForm = memory.form(weights.out.matrices[0])
        is_whole = self._share.is_whole
        wide = None if is_whole or form is ActivationForm.PLAIN else self._layers.wide
        library.program_delta(
            *(self._program, ctypes.byref(layer), ctypes.byref(state), self._in, self._conv, self._gates),
            *(self._values, self._out, form, wide),
        )
        self._layers.barrier("delta rule")
        self._layers.add(self._out, self._width, weights.out, None, (), "delta", is_written=is_whole)

    def _order(self) -> tuple[IntArray, IntArray]:
        """The channels of this rank's heads among all, and the rows of the stacked matrices."""
        delta, heads = self._delta, self._heads
        all_keys = delta.key_heads * delta.key_dim
        keys, values = _columns(self._share.delta_keys, delta.key_dim), _columns(heads, delta.value_dim)
        channels = np.concatenate([keys, all_keys + keys, 2 * all_keys + values])
        ends = (
            2 * all_keys + self._width,
            2 * (all_keys + self._width),
            2 * (all_keys + self._width) + delta.value_heads,
        )
        others = (end + part for end, part in zip(ends, (values, heads, heads), strict=True))
        return channels, np.concatenate([channels, *others])


def _columns(heads: Iterable[int], dim: int) -> IntArray:
    """Those of some heads of `dim` columns each."""
    return np.array([head * dim + i for head in heads for i in range(dim)], np.int32)
