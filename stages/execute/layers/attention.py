"""Grouped-query self-attention with rotary embedding and, in some models, biases, query and key norms, and windows."""

from pipeline.runtime.model_folder import ModelConfig
from pipeline.stages.execute.cpu.program import AttentionWeights, HeadNorms, Linear
from pipeline.stages.execute.weights import Weights


def attention_weights(config: ModelConfig, weights: Weights, index: int) -> AttentionWeights:
    """The weights of one layer, by Hugging Face's names. Queries, keys and values are stacked."""
    layer = f"model.layers.{index}"
    hidden, queries = config.hidden_size, config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    names = [f"{layer}.self_attn.{name}_proj" for name in "qkv"]
    rows = [queries, keys, keys]
    qkv = weights.matrices([f"{name}.weight" for name in names], rows, hidden)
    out = weights.matrix(f"{layer}.self_attn.o_proj.weight", hidden, queries)
    qkv_bias = weights.join_vectors([f"{name}.bias" for name in names], rows) if config.qkv_bias else None
    out_bias = weights.vector(f"{layer}.self_attn.o_proj.bias", hidden) if config.out_bias else None
    head_norms = None
    if config.qk_norm:
        query, key = (weights.vector(f"{layer}.self_attn.{name}_norm.weight", config.head_dim) for name in "qk")
        head_norms = HeadNorms(query, key)
    norm = weights.vector(f"{layer}.input_layernorm.weight", hidden)
    return AttentionWeights(norm, Linear(qkv, qkv_bias), Linear((out,), out_bias), head_norms, config.window_of(index))
