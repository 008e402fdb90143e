"""The Llama family: SmolLM2, Llama 2 and 3, Mistral (with its sliding window).

    embedding → layers × (norm → attention → + → norm → feed-forward → +) → norm → logits of the sampled tokens

Each sum is fused with the norm behind it: `x` is what the layer before has yielded, `residual` what flows beside it.
The residual is float32 whatever the dtype of the rest: it sums up every layer, and rounding it at each of them is what
bfloat16 would lose most by.
"""

import torch

from pipeline.kernels.kv_layout import LayerKV
from pipeline.kernels.select import Ops
from pipeline.model_folder import ModelConfig
from pipeline.stages.execute.layers.attention import Attention, AttentionBuffers
from pipeline.stages.execute.layers.mlp import Mlp, MlpBuffers
from pipeline.stages.execute.layers.rope import rope_frequencies
from pipeline.stages.execute.program import Buffer, Extent, Program
from pipeline.stages.execute.weights import Weights


class Llama:
    """The weights of a model, and how it is computed."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        hidden, vocab_size = config.hidden_size, config.vocab_size
        self.embedding = weights.take("model.embed_tokens.weight", vocab_size, hidden)
        self.head = self.embedding if config.tie_embeddings else weights.take("lm_head.weight", vocab_size, hidden)
        self.norm = weights.take("model.norm.weight", hidden)
        self.layers = [_Layer(config, weights, f"model.layers.{i}") for i in range(config.num_layers)]
        self.frequencies = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)

    def record(self, program: Program, ops: Ops, kv: list[LayerKV]) -> Buffer:
        """Record the forward pass. Returns the buffer of the logits, [samples, vocab_size] float32."""
        config, eps = self.config, self.config.rms_norm_eps
        residual = program.buffer(config.hidden_size, dtype=torch.float32)
        x = program.buffer(config.hidden_size)
        attention = AttentionBuffers(
            qkv=program.buffer((config.num_heads + 2 * config.num_kv_heads) * config.head_dim),
            attended=program.buffer(config.num_heads * config.head_dim),
            cos=program.buffer(config.head_dim, dtype=torch.float32),
            sin=program.buffer(config.head_dim, dtype=torch.float32),
            plan=ops.attention_plan(config.sliding_window, ops.dtype),
        )
        mlp = MlpBuffers(program.buffer(2 * config.intermediate_size), program.buffer(config.intermediate_size))
        last = program.buffer(config.hidden_size, Extent.SAMPLES)
        logits = program.buffer(config.vocab_size, Extent.SAMPLES, torch.float32)

        program.call(attention.plan.prepare, program.inputs)
        program.call(ops.rotary_angles, attention.cos, attention.sin, program.positions, self.frequencies)
        program.call(ops.take_rows, residual, self.embedding, program.ids)
        for i, (layer, layer_kv) in enumerate(zip(self.layers, kv, strict=True)):
            if i == 0:
                program.call(ops.rms_norm, x, residual, layer.attention_norm, eps)
            else:
                program.call(ops.add_rms_norm, x, residual, x, layer.attention_norm, eps)
            layer.attention.record(program, ops, layer_kv, attention, x, x)
            program.call(ops.add_rms_norm, x, residual, x, layer.mlp_norm, eps)
            layer.mlp.record(program, ops, mlp, x, x)
        program.call(ops.add_rms_norm, x, residual, x, self.norm, eps)
        program.call(ops.take_rows, last, x, program.sampled)
        program.call(ops.logits, logits, last, self.head)
        return logits


class _Layer:
    def __init__(self, config: ModelConfig, weights: Weights, prefix: str) -> None:
        self.attention_norm = weights.take(f"{prefix}.input_layernorm.weight", config.hidden_size)
        self.attention = Attention(weights, f"{prefix}.self_attn", config)
        self.mlp_norm = weights.take(f"{prefix}.post_attention_layernorm.weight", config.hidden_size)
        self.mlp = Mlp(weights, f"{prefix}.mlp", config)
