"""Grouped-query self-attention with rotary positions."""

from pipeline.model_folder import ModelConfig
from pipeline.stages.execute.program import AttentionWeights, Linear
from pipeline.stages.execute.weights import Weights


def attention_weights(config: ModelConfig, weights: Weights, layer: str) -> AttentionWeights:
    """Those of one layer, with Hugging Face's names. Queries, keys and values go together."""
    hidden, queries = config.hidden_size, config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    names = [f"{layer}.self_attn.{name}_proj" for name in "qkv"]
    rows = [queries, keys, keys]
    qkv = weights.matrices([f"{name}.weight" for name in names], rows, hidden)
    out = weights.matrix(f"{layer}.self_attn.o_proj.weight", hidden, queries)
    qkv_bias = out_bias = None
    if config.attention_bias:
        qkv_bias = weights.join_vectors([f"{name}.bias" for name in names], rows)
        out_bias = weights.vector(f"{layer}.self_attn.o_proj.bias", hidden)
    norm = weights.vector(f"{layer}.input_layernorm.weight", hidden)
    return AttentionWeights(norm, Linear(qkv, qkv_bias), Linear((out,), out_bias))
