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
from pipeline.kernels.step_inputs import StepInputs, block_bytes
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.rope import Rope
from pipeline.stages.execute.adapters.slots import OUT, QKV
from pipeline.stages.execute.cpu.native.key_calibration import CalibratedLayer, KeyFactors, calibrate_keys
from pipeline.stages.execute.cpu.native.kv_pages import FIRST_BYTES, KVPages
from pipeline.stages.execute.cpu.native.layers import NativeLayers
from pipeline.stages.execute.cpu.native.memory import NativeMemory, rows_of, turning_order
from pipeline.stages.execute.cpu.native.norms import NativeNorms
from pipeline.stages.execute.cpu.native.ranks import RankMemory
from pipeline.stages.execute.kv import KVPlan, SwapArray
from pipeline.stages.execute.layers.key_center import allows_center, key_center
from pipeline.stages.execute.layers.rope import rope_table, rotations
from pipeline.stages.execute.program import AnyMatrix, AttentionWeights, HeadNorms, Linear
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
        self._layer_locations = kv.layout.layer_locations
        self._num_blocks, self._max_model_len = kv.num_blocks, kv.max_model_len
        max_num_tokens = inputs.max_num_tokens
        self._queries = memory.rows(max_num_tokens, len(share.heads) * config.head_dim)
        self._attended = gathered.rows(max_num_tokens, config.num_heads * config.head_dim)
        gates = len(share.heads) * config.head_dim
        self._gates = memory.floats(max_num_tokens, gates) if config.attention_gate else 0
        all_heads = config.num_heads + 2 * config.num_kv_heads
        has_norm_of_all = config.qk_norm and config.qk_norm_kind == "all"
        self._qkv = gathered.floats(max_num_tokens, all_heads * config.head_dim) if has_norm_of_all else None
        self._query_form, self._score_form = self._forms()
        self._angles: dict[Rope | None, tuple[int, int]] = {}
        """Addresses of cosines and sines of every position, [max_model_len, head_dim / 2] each."""
        for rope, rotation in rotations(config, kv.max_model_len).items():
            cos, sin = rope_table(rotation.frequencies, kv.max_model_len, rotation.magnitudes)
            self._angles[rope] = memory.vector(cos), memory.vector(sin)
        self._layer_bytes = layer_bytes(config, kv_type, len(share.kv_heads))
        self._kv = [
            native.NativeLayerMemory(
                memory.allocate(kv.num_blocks * self._layer_bytes, touched_bytes=FIRST_BYTES if kv.touches else 0),
                *(len(share.kv_heads), config.head_dim, kv_type),
            )
            for _ in range(kv.layout.layers_per_group)
        ]
        """By place in a block."""
        self.pages = KVPages(library, [layer.data for layer in self._kv], kv.num_blocks * self._layer_bytes)
        self._calibrated: list[CalibratedLayer] = []
        self._plans: dict[tuple[int, int, int], int] = {}

    def emit(
        self,
        weights: AttentionWeights,
        slot: int = 0,
        inputs_at: "Callable[[ActivationForm], native.NativeRows] | None" = None,
    ) -> None:
        """Record a layer after its norm, whose results are at `slot`, or of other inputs."""
        config, library, share = self._config, self._library, self._share
        group, kv_index = self._layer_locations[self._layers.begin()]
        kv = ctypes.byref(self._layer_kv(weights, group, kv_index))
        library.program_use_tables(
            self._program, self._inputs.group_slots[group].ctypes.data, self._inputs.group_tables[group].ctypes.data
        )
        self._emit_qkv(weights, kv, slot, inputs_at or partial(self._norms.rows, slot=slot))
        width = config.num_heads * config.head_dim
        matrix = weights.out.matrices[0]
        rows, floats = self._layers.written(self._attended, width, matrix, share.heads.start * config.head_dim)
        if weights.gate is not None:
            order = rows_of(range(share.heads.start * config.head_dim, share.heads.stop * config.head_dim))
            products = self._memory.products(weights.gate, order, partial(self._norms.rows, slot=slot))
            library.program_products(self._program, self._gates, products, len(products), len(order))
            rows, floats = native.NativeRows(self._layers.wide + 4 * int(order[0]), width * 4), True
        plan = self._plan(weights, group)
        form = ctypes.byref(self._form_of(weights))
        library.program_attention(self._program, rows, floats, self._queries, kv, plan, form)
        if weights.gate is not None:
            self._gate(matrix, width)
        self._layers.barrier("attention")
        is_gated = weights.gate is not None and share.is_whole
        self._layers.add(self._attended, width, weights.out, weights.post_norm, OUT, "o", is_written=is_gated)

    def _gate(self, out: AnyMatrix, width: int) -> None:
        """Record the gate of attention's result, before the matmul with `out`."""
        form: ActivationForm = self._memory.form(out)
        heads, size = self._share.heads, self._config.head_dim
        part = len(heads) * size, heads.start * size, width
        self._library.program_gate(self._program, self._attended, form, self._layers.wide, self._gates, *part)

    def calibrate(self, run: Callable[[], object]) -> None:
        """Measure the keys of all layers whose keys are rounded, with `run`, which computes the step in the inputs."""
        if self._calibrated:
            sizes = self._config.vocab_size, self._max_model_len, self._num_blocks
            calibrate_keys(self._calibrated, self._inputs, run, *sizes)

    def blocks(self, swap: SwapArray | None) -> native.NativeBlocks:
        """The addresses of the blocks of all layers and of swap space."""
        layers = np.array([layer.data for layer in self._kv], np.uint64)
        self._memory.keep(layers)
        return native.NativeBlocks(
            layers=layers.ctypes.data,
            swap=None if swap is None else swap.ctypes.data,
            num_layers=len(layers),
            num_blocks=self._num_blocks,
            layer_bytes=self._layer_bytes,
        )

    def _emit_qkv(
        self, weights: AttentionWeights, kv: Any, slot: int, inputs_at: Callable[[ActivationForm], native.NativeRows]
    ) -> None:
        """Record the matmuls of queries, keys and values, their norms and rotation, and the writing of keys and
        values."""
        config, library, share = self._config, self._library, self._share
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        keys = [num_heads + head for head in share.kv_heads]
        kinds = [list(share.heads), keys, [head + num_kv_heads for head in keys]]
        norms = self._head_norms(weights.head_norms)
        angles = self._angles[weights.rope]
        if self._qkv is not None and not share.is_whole:
            for heads in kinds:
                self._gather_qkv(weights.qkv, heads, inputs_at)
            self._layers.barrier("qkv")
            head_share = native.NativeHeadShare(num_heads, num_kv_heads, share.heads.start, share.kv_heads.start)
            library.program_qkv_rows(
                *(self._program, self._queries, len(share.heads), kv, *angles, norms, self._query_form, self._qkv),
                ctypes.byref(head_share),
            )
        else:
            order = turning_order(num_heads + num_kv_heads, [head for kind in kinds for head in kind], config.head_dim)
            products = self._memory.products(weights.qkv, order, inputs_at)
            self._layers.adapt(QKV, weights.qkv, config.hidden_size, slot)
            library.program_qkv(
                *(self._program, self._queries, products, len(products), len(share.heads), kv, *angles),
                *(norms, self._query_form, self._qkv),
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

    def _layer_kv(self, weights: AttentionWeights, group: int, index: int) -> native.NativeLayerMemory:
        """The keys and values of a layer in this KV group, at this place in a block."""
        config, kv = self._config, self._kv[index]
        of_biases = key_center(config, weights, self._max_model_len)
        is_calibrated = kv.type == KVType.INT8 and allows_center(config)
        if of_biases is None and not is_calibrated:
            return kv
        heads = self._share.kv_heads
        center = np.zeros((len(heads), config.head_dim), np.float32)
        if of_biases is not None:
            center[:] = of_biases[heads.start : heads.stop, turning_order(1, [0], config.head_dim)]
        kv = native.NativeLayerMemory.from_buffer_copy(kv)  # layers of other groups share the memory
        kv.center = center.ctypes.data
        self._memory.keep(center)
        if is_calibrated:
            # Norms of all heads together leave the tokens of a layer to several threads, which can't add up queries.
            factors = KeyFactors(len(self._share.heads), *center.shape) if self._qkv is None else None
            if factors is not None:
                kv.factors = ctypes.addressof(factors.native)
            self._calibrated.append(CalibratedLayer(kv, group, center, factors))
        return kv

    def _forms(self) -> tuple[Any, native.NativeScoreOptions]:
        """What differs from plain attention in the scale of queries, or null, and in scores."""
        config, query = self._config, None
        if config.query_scale is not None or config.query_growth:
            scale = config.head_dim**-0.5 if config.query_scale is None else config.query_scale
            growth = None
            if config.query_growth:
                periods = np.arange(self._max_model_len) // config.query_growth_period
                growth = self._memory.vector((1 + config.query_growth * np.log1p(periods)).astype(np.float32))
            query = native.NativeQueryOptions(scale, growth)
        heads = self._share.heads
        slopes = None
        if config.alibi_slopes is not None:
            slopes = self._memory.vector(np.array(config.alibi_slopes[heads.start : heads.stop], np.float32))
        score = native.NativeScoreOptions(config.attention_softcap or 0.0, slopes)
        return query and ctypes.byref(query), score

    def _form_of(self, weights: AttentionWeights) -> native.NativeScoreOptions:
        """What differs from plain attention in a layer's scores."""
        form, heads = native.NativeScoreOptions.from_buffer_copy(self._score_form), self._share.heads
        if weights.sinks is not None:
            form.sinks = self._memory.vector(np.asarray(weights.sinks, np.float32)[heads.start : heads.stop])
        if weights.biases is not None:
            biases = np.ascontiguousarray(np.asarray(weights.biases, np.float32)[heads.start : heads.stop])
            form.biases, form.reach = self._memory.vector(biases), biases.shape[1] // 2
        return form

    def _head_norms(self, norms: HeadNorms | None) -> Any:
        """The weights in the panels' order of a head's dimensions, or null."""
        if norms is None:
            return None
        config = self._config
        order = turning_order(1, [0], config.head_dim)
        parts = (norms.query, self._share.heads), (norms.key, self._share.kv_heads)
        of_heads = [np.asarray(weight).reshape(-1, config.head_dim)[:, order] for weight, _ in parts]
        query, key = (
            self._memory.vector(weight if config.qk_norm_kind == "head" else weight[heads.start : heads.stop])
            for weight, (_, heads) in zip(of_heads, parts, strict=True)
        )
        each, every = config.qk_norm_kind == "each_head", config.qk_norm_kind == "all"
        return ctypes.byref(
            native.NativeHeadNorms(query, key, config.rms_norm_eps, config.norm == "layer", each, every)
        )

    def _plan(self, weights: AttentionWeights, group: int) -> int:
        """The attention plan of all layers with the same window in a KV group. It becomes an op before the first of
        them."""
        window, after = weights.window or 0, -1 if weights.window_after is None else weights.window_after
        key = window, after, group
        if key not in self._plans:
            share = self._share
            self._plans[key] = self._library.program_attention_plan(
                self._program, len(share.heads), len(share.kv_heads), window, after
            )
        return self._plans[key]


def layer_bytes(config: ModelConfig, kv_type: KVType, num_kv_heads: int) -> int:
    """Bytes of a KV block in one layer, with this number of heads."""
    return block_bytes(1, num_kv_heads, config.head_dim, 2 if kv_type is KVType.BF16 else 1)
