"""Attention of a program in the CPU library.

    norm ─► queries, keys and values ─► turned; keys and values into KV blocks ─► attention ─► out ─► residual

Keys and values are stored in the order in which matmuls read them (kernels/cpu/gemm.h).
"""

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from pipeline.kernels.cpu import native
from pipeline.kernels.cpu.native import ActivationForm, KVType
from pipeline.kernels.step_inputs import IntArray, StepInputs, block_bytes
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.special_layers import Heads
from pipeline.stages.execute.adapters.slots import OUT, QKV
from pipeline.stages.execute.cpu.native.key_calibration import CalibratedLayer, KeyFactors, calibrate_keys
from pipeline.stages.execute.cpu.native.kv_pages import FIRST_BYTES, KVPages
from pipeline.stages.execute.cpu.native.layers import NativeLayers
from pipeline.stages.execute.cpu.native.memory import NativeMemory, rows_of, step_arrays, turning_order
from pipeline.stages.execute.cpu.native.norms import NativeNorms
from pipeline.stages.execute.cpu.native.ranks import RankMemory
from pipeline.stages.execute.kv import KVPlan, SwapArray
from pipeline.stages.execute.layers.key_center import allows_center, key_center
from pipeline.stages.execute.layers.rope import RopeKey, rope_table, rotations
from pipeline.stages.execute.program import AnyMatrix, AnyVector, AttentionWeights, Linear
from pipeline.stages.execute.ranks.share import Share


class NativeAttention:
    """Records attention of one program, and owns the KV memory and what its ops share."""

    def __init__(
        self,
        library: ctypes.CDLL,
        program: int,
        memory: NativeMemory,
        config: ModelConfig,
        inputs: StepInputs,
        kv: KVPlan,
        kv_type: KVType,
        norms: NativeNorms,
        layers: NativeLayers,
        gathered: RankMemory,
        share: Share,
    ) -> None:
        """Ranks compute their share of the heads; the results of all heads are `gathered`."""
        self._library, self._program, self._memory, self._config = library, program, memory, config
        self._inputs, self._norms, self._layers, self._share = inputs, norms, layers, share
        self._layout = kv.layout
        self._num_blocks, self._max_model_len = kv.num_blocks, kv.max_model_len
        max_num_tokens = inputs.max_num_tokens
        widest = config.query_size if share.is_whole else len(share.heads) * config.head_dim
        self._queries = memory.rows(max_num_tokens, widest)
        self._attended = gathered.rows(max_num_tokens, config.query_size)
        gates = widest // config.head_dim if config.gate_per_head else widest
        self._gates = memory.floats(max_num_tokens, gates) if config.attention_gate else 0
        all_heads = config.num_heads + 2 * config.num_kv_heads
        has_norm_of_all = config.qk_norm and config.qk_norm_kind == "all"
        self._qkv = gathered.floats(max_num_tokens, all_heads * config.head_dim) if has_norm_of_all else None
        self._growth, self._score_form = self._forms()
        self._angles: dict[RopeKey, tuple[int, int]] = {}
        """Addresses of cosines and sines of every position, [max_model_len, head_dim / 2] each, or of every token."""
        for key, rotation in rotations(config, kv.max_model_len).items():
            if (angles := inputs.angles) is not None:
                self._angles[key] = angles.cos.ctypes.data, angles.sin.ctypes.data
                continue
            cos, sin = rope_table(rotation.frequencies, kv.max_model_len, rotation.magnitudes)
            self._angles[key] = memory.vector(cos), memory.vector(sin)
        self._kv_type = kv_type
        self._unit_bytes = kv.layout.unit_bytes or layer_bytes(config, kv_type, len(share.kv_heads))
        self._units = [
            memory.allocate(kv.num_blocks * self._unit_bytes, touched_bytes=FIRST_BYTES if kv.touches else 0)
            for _ in range(kv.layout.layers_per_group)
        ]
        """Addresses of the units of a block."""
        self._kv: dict[int, native.NativeLayerMemory] = {}
        """By layer, of those that were recorded."""
        self.pages = KVPages(library, self._units, kv.num_blocks * self._unit_bytes)
        self._calibrated: list[CalibratedLayer] = []
        self._plans: dict[tuple[int, int, int, Heads, bool], int] = {}

    def emit(
        self,
        weights: AttentionWeights,
        slot: int = 0,
        inputs_at: "Callable[[ActivationForm], native.NativeRows] | None" = None,
    ) -> None:
        """Record a layer after its norm, whose results are at `slot`, or of other inputs."""
        library, share, heads, config = self._library, self._share, weights.heads, self._config
        own = self._query_heads(weights)
        index = self._layers.begin()
        group, _ = self._layout.layer_locations[index]
        memory = self._layer_kv(weights, index) if weights.source is None else self._kv[weights.source]
        self._kv[self._layers.last] = memory
        kv = ctypes.byref(memory)
        if (windows := self._inputs.windows) is not None and weights.in_windows:
            entries = ctypes.byref(step_arrays(windows))
            library.program_use_entries(self._program, entries, windows.row_count.ctypes.data)
        else:
            library.program_use_tables(
                self._program, self._inputs.group_slots[group].ctypes.data, self._inputs.group_tables[group].ctypes.data
            )
        self._emit_qkv(weights, kv, slot, inputs_at or partial(self._norms.rows, slot=slot))
        width, dim = heads.query_size, heads.dim
        matrix = weights.out.matrices[0]
        rows, floats = self._layers.written(self._attended, width, matrix, own.start * dim)
        if weights.gate is not None:
            each = 1 if config.gate_per_head else dim
            order = rows_of(range(own.start * each, own.stop * each))
            products = self._memory.products(weights.gate, order, partial(self._norms.rows, slot=slot))
            library.program_products(self._program, self._gates, products, len(products), len(order))
            rows, floats = native.NativeRows(self._layers.wide + 4 * own.start * dim, width * 4), True
        plan = self._plan(weights, group)
        form = ctypes.byref(self._form_of(weights))
        library.program_attention(self._program, rows, floats, self._queries, kv, plan, form)
        if weights.gate is not None:
            self._gate(matrix, own, width)
        self._layers.barrier("attention")
        is_gated = weights.gate is not None and share.is_whole
        self._layers.add(self._attended, width, weights.out, weights.post_norm, OUT, "o", is_written=is_gated)

    def _gate(self, out: AnyMatrix, heads: range, width: int) -> None:
        """Record the gate of attention's result, before the matmul with `out`."""
        form: ActivationForm = self._memory.form(out)
        config, size = self._config, self._config.head_dim
        part = len(heads) * size, heads.start * size, width
        how = size if config.gate_per_head else 1, config.gate_function == "softplus"
        self._library.program_gate(self._program, self._attended, form, self._layers.wide, self._gates, *part, *how)

    def calibrate(self, run: Callable[[], object]) -> None:
        """Measure the keys of all layers whose keys are rounded, with `run`, which computes the step in the inputs."""
        if self._calibrated:
            sizes = self._config.vocab_size, self._max_model_len, self._num_blocks
            calibrate_keys(self._calibrated, self._inputs, run, *sizes)

    def blocks(self, swap: SwapArray | None) -> native.NativeBlocks:
        """The addresses of the blocks of all layers and of swap space."""
        layers = np.array(self._units, np.uint64)
        self._memory.keep(layers)
        return native.NativeBlocks(
            layers=layers.ctypes.data,
            swap=None if swap is None else swap.ctypes.data,
            num_layers=len(layers),
            num_blocks=self._num_blocks,
            layer_bytes=self._unit_bytes,
        )

    def _emit_qkv(
        self, weights: AttentionWeights, kv: Any, slot: int, inputs_at: Callable[[ActivationForm], native.NativeRows]
    ) -> None:
        """Record the matmuls of queries, keys and values, their norms and rotation, and the writing of keys and
        values."""
        config, library, share = self._config, self._library, self._share
        num_heads, num_kv_heads, dim = weights.heads
        keys = [num_heads + head for head in self._kv_heads(weights)] if weights.has_keys else []
        queries = self._query_heads(weights)
        kinds = [list(queries), keys, [head + num_kv_heads for head in keys]]
        norms, query_form = self._head_norms(weights), self._query_form(dim)
        angles = self._angles[weights.rope, dim]
        if self._qkv is not None and not share.is_whole:
            for heads in kinds:
                self._gather_qkv(weights.qkv, heads, inputs_at)
            self._layers.barrier("qkv")
            head_share = native.NativeHeadShare(num_heads, num_kv_heads, share.heads.start, share.kv_heads.start)
            library.program_qkv_rows(
                *(self._program, self._queries, len(queries), kv, *angles, norms, query_form, self._qkv),
                ctypes.byref(head_share),
            )
        else:
            order = turning_order(num_heads + num_kv_heads, [head for kind in kinds for head in kind], dim)
            products = self._memory.products(weights.qkv, order, inputs_at)
            self._layers.adapt(QKV, weights.qkv, config.hidden_size, slot)
            library.program_qkv(
                *(self._program, self._queries, products, len(products), len(queries), kv, *angles),
                *(norms, query_form, self._qkv),
            )

    def _gather_qkv(
        self, qkv: Linear, heads: list[int], inputs_at: Callable[[ActivationForm], native.NativeRows]
    ) -> None:
        """Record the matmul of these heads, which are adjacent and of one kind; the results of all ranks lie side by
        side."""
        config, library = self._config, self._library
        num_turning = config.num_heads + config.num_kv_heads
        products = self._memory.products(qkv, turning_order(num_turning, heads, config.head_dim), inputs_at)
        found = [product for product in products if product.matrix.columns]
        assert len(found) == 1 and self._qkv is not None
        library.program_stride(self._program, (num_turning + config.num_kv_heads) * config.head_dim)
        out = self._qkv + 4 * heads[0] * config.head_dim
        (product,) = found
        library.program_linear(self._program, out, product.rows, product.matrix, len(heads) * config.head_dim)

    def _query_heads(self, weights: AttentionWeights) -> range:
        """This rank's query heads. A model whose layers have different heads has one rank."""
        return range(weights.heads.num) if self._share.is_whole else self._share.heads

    def _kv_heads(self, weights: AttentionWeights) -> range:
        """This rank's KV heads. A model whose layers have different heads has one rank."""
        return range(weights.heads.num_kv) if self._share.is_whole else self._share.kv_heads

    def _layer_kv(self, weights: AttentionWeights, index: int) -> native.NativeLayerMemory:
        """The keys and values of the layer with this number in the program."""
        config, heads, dim = self._config, self._kv_heads(weights), weights.heads.dim
        group, unit = self._layout.layer_locations[index]
        kv = native.NativeLayerMemory(
            self._units[unit] + self._layout.begin_of(index), len(heads), dim, self._kv_type, stride=self._unit_bytes
        )
        of_biases = key_center(config, weights, self._max_model_len)
        is_calibrated = kv.type == KVType.INT8 and allows_center(config)
        if of_biases is None and not is_calibrated:
            return kv
        center = np.zeros((len(heads), dim), np.float32)
        if of_biases is not None:
            center[:] = of_biases[heads.start : heads.stop, turning_order(1, [0], dim)]
        kv.center = center.ctypes.data
        self._memory.keep(center)
        if is_calibrated:
            # Norms of all heads together leave the tokens of a layer to several threads, which can't add up queries.
            factors = KeyFactors(len(self._query_heads(weights)), *center.shape) if self._qkv is None else None
            if factors is not None:
                kv.factors = ctypes.addressof(factors.native)
            self._calibrated.append(CalibratedLayer(kv, group, center, factors))
        return kv

    def _query_form(self, head_dim: int) -> Any:
        """What differs from plain attention in the scale of queries, or null."""
        config = self._config
        if config.query_scale is None and not config.query_growth:
            return None
        scale = head_dim**-0.5 if config.query_scale is None else config.query_scale
        return ctypes.byref(native.NativeQueryOptions(scale, self._growth))

    def _forms(self) -> tuple[int | None, native.NativeScoreOptions]:
        """The factors of queries by position, or null, and what differs from plain attention in scores."""
        config, growth = self._config, None
        if config.query_growth:
            periods = np.arange(self._max_model_len) // config.query_growth_period
            growth = self._memory.vector((1 + config.query_growth * np.log1p(periods)).astype(np.float32))
        heads = self._share.heads
        slopes = None
        if config.alibi_slopes is not None:
            slopes = self._memory.vector(np.array(config.alibi_slopes[heads.start : heads.stop], np.float32))
        return growth, native.NativeScoreOptions(config.attention_softcap or 0.0, slopes)

    def _form_of(self, weights: AttentionWeights) -> native.NativeScoreOptions:
        """What differs from plain attention in a layer's scores."""
        form, heads = native.NativeScoreOptions.from_buffer_copy(self._score_form), self._share.heads
        if weights.sinks is not None:
            form.sinks = self._memory.vector(np.asarray(weights.sinks, np.float32)[heads.start : heads.stop])
        if weights.biases is not None:
            biases = np.ascontiguousarray(np.asarray(weights.biases, np.float32)[heads.start : heads.stop])
            form.biases, form.reach = self._memory.vector(biases), biases.shape[1] // 2
        return form

    def _head_norms(self, weights: AttentionWeights) -> Any:
        """The weights in the panels' order of a head's dimensions, or null."""
        config, norms, dim = self._config, weights.head_norms, weights.heads.dim
        if norms is None:
            return None
        order = turning_order(1, [0], dim)
        parts = (norms.query, self._query_heads(weights)), (norms.key, self._kv_heads(weights))
        query, key = (None if one is None else self._head_norm(one, heads, order) for one, heads in parts)
        each, every = config.qk_norm_kind == "each_head", config.qk_norm_kind == "all"
        return ctypes.byref(
            native.NativeHeadNorms(
                *(query, key, config.rms_norm_eps, config.norm == "layer", each, every, weights.value_norm)
            )
        )

    def _head_norm(self, weight: AnyVector, heads: range, order: IntArray) -> int:
        of_heads = np.asarray(weight).reshape(-1, len(order))[:, order]
        is_of_all = self._config.qk_norm_kind == "head"
        return self._memory.vector(of_heads if is_of_all else of_heads[heads.start : heads.stop])

    def _plan(self, weights: AttentionWeights, group: int) -> int:
        """The attention plan of all layers with the same window in a KV group. It becomes an op before the first of
        them."""
        window, after = weights.window or 0, -1 if weights.window_after is None else weights.window_after
        key = window, after, group, weights.heads, weights.in_windows
        if key not in self._plans:
            num_heads, num_kv_heads = len(self._query_heads(weights)), len(self._kv_heads(weights))
            self._plans[key] = self._library.program_attention_plan(
                self._program, num_heads, num_kv_heads, window, after
            )
        return self._plans[key]


def layer_bytes(config: ModelConfig, kv_type: KVType, num_kv_heads: int) -> int:
    """Bytes of a KV block in one layer, with this number of heads."""
    return block_bytes(1, num_kv_heads, config.head_dim, 2 if kv_type is KVType.BF16 else 1)
