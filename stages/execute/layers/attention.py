"""Grouped-query self-attention with rotary positions, over the paged KV cache."""

from dataclasses import dataclass

from torch import Tensor

from pipeline.kernels.kv_layout import LayerKV
from pipeline.kernels.paged_attention import AttentionPlan
from pipeline.kernels.select import Ops
from pipeline.model_folder import ModelConfig
from pipeline.stages.execute.program import Buffer, Program
from pipeline.stages.execute.weights import Weights


@dataclass(frozen=True, slots=True)
class AttentionBuffers:
    """Memory that the attention layers of a model share, and what they share of a step."""

    qkv: Buffer
    attended: Buffer
    cos: Buffer
    sin: Buffer
    plan: AttentionPlan


class Attention:
    """Queries, keys and values by one product; their turning and the write to the cache; attention; the projection."""

    def __init__(self, weights: Weights, prefix: str, config: ModelConfig) -> None:
        hidden, queries = config.hidden_size, config.num_heads * config.head_dim
        keys = config.num_kv_heads * config.head_dim
        names = [f"{prefix}.{name}_proj" for name in "qkv"]
        rows = [queries, keys, keys]
        self.qkv_weight = weights.join([f"{name}.weight" for name in names], rows, hidden)
        self.out_weight = weights.take(f"{prefix}.o_proj.weight", hidden, queries)
        self.qkv_bias: Tensor | None = None
        self.out_bias: Tensor | None = None
        if config.attention_bias:
            self.qkv_bias = weights.join([f"{name}.bias" for name in names], rows)
            self.out_bias = weights.take(f"{prefix}.o_proj.bias", hidden)

    def record(
        self, program: Program, ops: Ops, kv: LayerKV, buffers: AttentionBuffers, x: Buffer, out: Buffer
    ) -> None:
        """Attend from `x` into `out`, which may be the same memory: x is read before out is written."""
        program.call(ops.linear, buffers.qkv, x, self.qkv_weight, self.qkv_bias)
        program.call(ops.rotary_write, buffers.qkv, buffers.cos, buffers.sin, program.slots, kv)
        program.call(ops.attention, buffers.attended, buffers.qkv, kv, buffers.plan)
        program.call(ops.linear, out, buffers.attended, self.out_weight, self.out_bias)
