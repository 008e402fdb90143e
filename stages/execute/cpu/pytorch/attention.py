"""Attention of a torch program, between its matmuls."""

from typing import NamedTuple

import torch

from pipeline.kernels.attention.kv_layout import LayerKV, allocate_units, layer_at, layers_of
from pipeline.kernels.attention.paged_attention import AttentionPlan, ScoreOptions
from pipeline.kernels.attention.rotary import given_angles
from pipeline.kernels.matrix import as_tensor
from pipeline.kernels.select import Ops
from pipeline.runtime.model.special_layers import Heads
from pipeline.stages.execute.cpu.program import ProgramPlan
from pipeline.stages.execute.cpu.pytorch.calls import Buffer, Extent, TorchCalls
from pipeline.stages.execute.kv import kv_dtype
from pipeline.stages.execute.layers.key_center import key_center
from pipeline.stages.execute.layers.rope import RopeKey, rotations
from pipeline.stages.execute.program import AttentionWeights, Linear


class TorchLayer(NamedTuple):
    """What a layer's attention reads and writes."""

    qkv: Buffer
    """Queries, keys and values; only queries if it reads the keys and values of another layer."""
    attended: Buffer
    kv: LayerKV
    group: int
    """Its KV group"""


class TorchAttention:
    """Owns the KV memory and the buffers of all layers."""

    def __init__(self, ops: Ops, calls: TorchCalls, plan: ProgramPlan) -> None:
        config, kv, dtype = plan.config, plan.kv, getattr(torch, kv_dtype(plan.settings.execute))
        self._ops, self._calls, self._config, self._inputs = ops, calls, config, plan.inputs
        self._layout, self._max_model_len = kv.layout, kv.max_model_len
        num_units = kv.layout.layers_per_group
        if kv.layout.unit_bytes:
            self.memory = allocate_units(num_units, kv.num_blocks, kv.layout.unit_bytes, dtype, ops.device)
            self.kv: list[LayerKV] = []
        else:
            sizes = config.num_kv_heads, config.head_dim
            self.memory = ops.kv_allocate(num_units, kv.num_blocks, *sizes, dtype, ops.device)
            self.kv = layers_of(self.memory, *sizes)
        """By place in a block; empty if layers have different sizes."""
        self._sources: list[LayerKV] = []
        """By layer."""
        self._buffers: dict[tuple[Heads, bool], tuple[Buffer, Buffer]] = {}
        self._gates: dict[int, Buffer] = {}
        """By width."""
        self._angles: dict[RopeKey, tuple[Buffer, Buffer]] = {}
        self._plans: dict[tuple[int | None, int | None, int, bool], AttentionPlan] = {}
        slopes = None if config.alibi_slopes is None else torch.tensor(config.alibi_slopes)
        self._score_form = ScoreOptions(config.query_scale, config.attention_softcap, slopes, config.sinks)

    def begin(self) -> None:
        """Record what a step needs before its first layer."""
        if (angles := self._inputs.angles) is not None:
            given = [Buffer(torch.from_numpy(table), Extent.TOKENS) for table in (angles.cos, angles.sin)]
            cos, sin = (self._calls.buffer(2 * angles.cos.shape[1], dtype=torch.float32) for _ in range(2))
            self._calls.add(given_angles, cos, sin, *given)
            self._angles = dict.fromkeys(rotations(self._config, self._max_model_len), (cos, sin))
            return
        for key, rotation in rotations(self._config, self._max_model_len).items():
            cos, sin = (self._calls.buffer(2 * len(rotation.frequencies), dtype=torch.float32) for _ in range(2))
            frequencies = torch.from_numpy(rotation.frequencies)
            magnitudes = None if rotation.magnitudes is None else torch.from_numpy(rotation.magnitudes)
            self._calls.add(self._ops.rotary_angles, cos, sin, self._calls.positions, frequencies, magnitudes)
            self._angles[key] = cos, sin

    def layer(self, weights: AttentionWeights, index: int) -> TorchLayer:
        """The layer with this number."""
        heads = weights.heads
        group, unit = self._layout.layer_locations[index]
        if weights.source is not None:
            kv = self._sources[weights.source]
        elif self._layout.unit_bytes:
            kv = layer_at(self.memory[unit], self._layout.begin_of(index), heads.num_kv, heads.dim)
        else:
            kv = self.kv[unit]
        if (center := key_center(self._config, weights, self._max_model_len)) is not None:
            kv = kv._replace(center=torch.from_numpy(center))
        self._sources += [kv] * (index + 1 - len(self._sources))
        key = heads, weights.has_keys
        if key not in self._buffers:
            width = heads.query_size + (2 * heads.kv_size if weights.has_keys else 0)
            self._buffers[key] = self._calls.buffer(width), self._calls.buffer(heads.query_size)
        return TorchLayer(*self._buffers[key], kv, group)

    def record(self, weights: AttentionWeights, layer: TorchLayer) -> None:
        """Record everything from the projected queries, keys and values to attention's result."""
        config, calls, ops = self._config, self._calls, self._ops
        qkv, kv = layer.qkv, layer.kv
        angles = self._angles[weights.rope, weights.heads.dim]
        if not weights.has_keys:
            norm = None if weights.head_norms is None else as_tensor(weights.head_norms.query)
            calls.add(ops.turn_queries, qkv, *angles, kv, norm, config.rms_norm_eps)
        else:
            self._norm(weights, layer)
            slots = calls.slots[layer.group]
            if (windows := self._inputs.windows) is not None and weights.in_windows:
                slots = Buffer(torch.from_numpy(windows.slots), Extent.TOKENS)
            calls.add(ops.rotary_write, qkv, *angles, slots, kv)
        if config.query_growth:
            growth = config.query_growth, config.query_growth_period
            calls.add(ops.scale_queries, qkv, calls.positions, kv, *growth)
        sinks, biases = (None if one is None else as_tensor(one) for one in (weights.sinks, weights.biases))
        calls.add(ops.attention, layer.attended, qkv, kv, self._plan(weights, layer.group), sinks, biases)
        if weights.gate is not None:
            calls.add(ops.gate, layer.attended, self.gate(weights.gate), config.gate_function)

    def gate(self, linear: Linear) -> Buffer:
        """What a layer's gate writes."""
        width = sum(matrix.num_rows for matrix in linear.matrices)
        return self._gates.setdefault(width, self._calls.buffer(width))

    def _norm(self, weights: AttentionWeights, layer: TorchLayer) -> None:
        config, calls, ops = self._config, self._calls, self._ops
        if (norms := weights.head_norms) is not None:
            assert norms.key is not None
            vectors = as_tensor(norms.query), as_tensor(norms.key)
            if config.qk_norm_kind == "head" and config.norm == "rms":
                calls.add(ops.head_norm, layer.qkv, *vectors, layer.kv, config.rms_norm_eps)
            else:
                how = config.norm, config.qk_norm_kind
                calls.add(ops.qk_norm, layer.qkv, *vectors, layer.kv, config.rms_norm_eps, *how)
        if weights.value_norm:
            calls.add(ops.value_norm, layer.qkv, layer.kv, config.rms_norm_eps)

    def _plan(self, weights: AttentionWeights, group: int) -> AttentionPlan:
        """The attention plan of all layers with the same window in a KV group, prepared before the first of them."""
        if (key := (weights.window, weights.window_after, group, weights.in_windows)) not in self._plans:
            self._plans[key] = self._ops.attention_plan(weights.window, self._score_form, group, weights.window_after)
            inputs = self._inputs.windows if weights.in_windows else self._inputs
            assert inputs is not None
            self._calls.add(self._plans[key].prepare, inputs)
        return self._plans[key]
