"""Shapes of known models, to be profiled with random weights: the duration of a step does not depend on the values."""

from typing import Any

from pipeline.runtime.model_folder import Architecture, ModelConfig


def shape(
    name: str,
    architecture: Architecture = "llama",
    *,
    layers: int,
    hidden: int,
    intermediate: int,
    heads: tuple[int, int, int],
    vocab: int,
    max_position: int,
    rope_theta: float,
    rms_norm_eps: float = 1e-5,
    eos_id: int = 2,
    tie_embeddings: bool = True,
    **features: Any,
) -> ModelConfig:
    """A model without weight files. `heads` are query heads, key-value heads and head_dim."""
    return ModelConfig(
        name=name,
        architecture=architecture,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        vocab_size=vocab,
        max_position=max_position,
        rms_norm_eps=rms_norm_eps,
        rope_theta=rope_theta,
        tie_embeddings=tie_embeddings,
        eos_ids=[eos_id],
        weight_files=[],
        **features,
    )


_SMOLLM2_135M = shape(
    "smollm2-135m",
    layers=30,
    hidden=576,
    intermediate=1536,
    heads=(9, 3, 64),
    vocab=49152,
    max_position=8192,
    rope_theta=1e5,
)
_QWEN2_05B = shape(
    "qwen2-0.5b",
    "qwen2",
    layers=24,
    hidden=896,
    intermediate=4864,
    heads=(14, 2, 64),
    vocab=151936,
    max_position=32768,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    eos_id=151645,
    qkv_bias=True,
)
_QWEN3_06B = shape(
    "qwen3-0.6b",
    "qwen3",
    layers=28,
    hidden=1024,
    intermediate=3072,
    heads=(16, 8, 128),
    vocab=151936,
    max_position=40960,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    eos_id=151645,
    qk_norm=True,
)
SHAPES = {config.name: config for config in (_SMOLLM2_135M, _QWEN2_05B, _QWEN3_06B)}
