"""The attention of a model on a GPU: norms and rotary embedding of queries and keys, their write to the KV cache, and
attention itself. The matmuls before and after it belong to the model.

Shapes: T tokens of a step with padding, P split-K partials, Q query heads, K key-value heads, D head_dim.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.kernels.attention.paged_attention import ScoreOptions
from pipeline.kernels.matrix import as_tensor
from pipeline.kernels.triton import kv_cache
from pipeline.kernels.triton.attention.decode import attend_decode
from pipeline.kernels.triton.attention.prefill import attend
from pipeline.kernels.triton.attention.qk_norm import QkNormWeights, qk_norm
from pipeline.kernels.triton.attention.tasks import AttentionTasks, Scratch
from pipeline.kernels.triton.rotary import HeadNorms, rotary_write
from pipeline.kernels.triton.rows import StepArrays
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.layers.key_center import key_center
from pipeline.stages.execute.layers.rope import RopeKey, rope_table, rotations
from pipeline.stages.execute.program import AnyVector, AttentionWeights


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """What one layer's attention needs."""

    keys: Tensor
    values: Tensor
    tasks: AttentionTasks
    group: int
    """The KV group."""
    cos: Tensor
    """[max_model_len, D / 2], of the layer's rotary embedding"""
    sin: Tensor
    head_norms: HeadNorms | None
    """RMS norms of each head, part of the next kernel."""
    qk_norm: QkNormWeights | None
    """Other norms of queries and keys, a launch of their own."""
    center: Tensor | None
    """[K, D], of keys in 8 bits"""
    sinks: Tensor | None
    """[Q]"""


class DeviceAttention:
    """Computes the attention of all layers. Owns what is between its launches."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, max_num_tokens: int, max_num_rows: int, where: torch.device
    ) -> None:
        self._config, self._dtype, self._where = config, dtype, where
        self._max_num_tokens, self._max_num_rows = max_num_tokens, max_num_rows
        slopes = None if config.alibi_slopes is None else torch.tensor(config.alibi_slopes)
        self._form = ScoreOptions(config.query_scale, config.attention_softcap, slopes, config.sinks)
        self._growth = config.query_growth, config.query_growth_period
        self._queries = torch.zeros(max_num_tokens, config.num_heads * config.head_dim, dtype=dtype, device=where)
        self._has_qk_norm = config.qk_norm and (config.qk_norm_kind != "head" or config.norm == "layer")
        width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim if self._has_qk_norm else 0
        self._normed = torch.zeros(max_num_tokens, width, dtype=torch.float32, device=where)
        self._tasks: dict[int | None, AttentionTasks] = {}
        self._scratch: Scratch | None = None
        self._angles: dict[RopeKey, tuple[Tensor, Tensor]] = {}
        self._max_model_len = 0

    def use(self, max_model_len: int) -> None:
        """Set the longest sequence, before any `layer`."""
        self._max_model_len = max_model_len
        for key, rotation in rotations(self._config, max_model_len).items():
            cos, sin = rope_table(rotation.frequencies, max_model_len, rotation.magnitudes)
            self._angles[key] = torch.from_numpy(cos).to(self._where), torch.from_numpy(sin).to(self._where)

    def layer(self, weights: AttentionWeights, keys: Tensor, values: Tensor, group: int) -> AttentionLayer:
        """The next layer, whose keys and values are in `keys` and `values` (kv_cache.py)."""
        is_quantized = kv_cache.is_quantized(keys)
        center = key_center(self._config, weights, self._max_model_len) if is_quantized else None
        cos, sin = self._angles[weights.rope, weights.heads.dim]
        head_norms, qk_norm_weights = self._norms(weights)
        return AttentionLayer(
            keys=keys,
            values=values,
            tasks=self._tasks_of(weights.window, quantized=is_quantized),
            group=group,
            cos=cos,
            sin=sin,
            head_norms=head_norms,
            qk_norm=qk_norm_weights,
            center=None if center is None else torch.from_numpy(center).to(self._where),
            sinks=None if weights.sinks is None else self._vector(weights.sinks),
        )

    def plan(self, step: StepArrays, *, one_each: bool) -> None:
        """Divide the step's attention among programs, before the first layer."""
        for tasks in self._tasks.values():
            tasks.plan(step, one_each=one_each)

    def compute(
        self, out: Tensor, qkv: Tensor, step: StepArrays, layer: AttentionLayer, *, decodes: bool, pdl: bool = False
    ) -> None:
        """out [T, Q * D], qkv [P, T, (Q + 2K) * D]. `decodes`: each entry has one token. `pdl`: see `attend_decode`."""
        num, arrays = step.num_tokens, step.of_group(layer.group)
        if layer.qk_norm is not None:
            normed = self._normed[:num].unsqueeze(0)
            qk_norm(normed, qkv, layer.qk_norm, self._config.head_dim)
            qkv, pdl = normed, False  # that launch does not start the next one early
        keys, values, norms, center = layer.keys, layer.values, layer.head_norms, layer.center
        angles, growth = (layer.cos, layer.sin), self._growth
        if decodes:
            attend_decode(
                out, qkv, *angles, arrays, keys, values, layer.tasks, norms, center, layer.sinks, growth, pdl=pdl
            )
        else:
            queries = self._queries[:num]
            rotary_write(queries, qkv, *angles, arrays, keys, values, norms, center, growth)
            attend(out, queries, keys, values, arrays, layer.tasks, layer.sinks)

    def _tasks_of(self, window: int | None, *, quantized: bool) -> AttentionTasks:
        if window not in self._tasks:
            config = self._config
            self._tasks[window] = AttentionTasks(
                self._max_num_rows,
                self._max_num_tokens,
                config.num_heads,
                config.num_kv_heads,
                config.head_dim,
                self._dtype,
                self._where,
                window,
                scratch=self._scratch,
                quantized=quantized,
                form=self._form,
            )
            self._scratch = self._tasks[window].scratch
        return self._tasks[window]

    def _norms(self, weights: AttentionWeights) -> tuple[HeadNorms | None, QkNormWeights | None]:
        if weights.head_norms is None:
            return None, None
        config, eps = self._config, float(self._config.rms_norm_eps)
        assert weights.head_norms.key is not None, "each layer has keys of its own here"
        query, key = self._vector(weights.head_norms.query), self._vector(weights.head_norms.key)
        if not self._has_qk_norm:
            return (query, key, eps), None
        if config.qk_norm_kind == "head":  # the same weights for each head
            query, key = query.repeat(config.num_heads), key.repeat(config.num_kv_heads)
        together = config.qk_norm_kind == "all"
        return None, QkNormWeights(query, key, eps, together, centers=config.norm == "layer")

    def _vector(self, values: AnyVector) -> Tensor:
        return as_tensor(values).to(self._where, torch.float32).contiguous()
