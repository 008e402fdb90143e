"""A model's shape, without weights."""

from typing import Any

import msgspec

from pipeline.runtime.model.architecture_names import Architecture
from pipeline.runtime.model.model_config import ModelConfig


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


def with_layers(config: ModelConfig, num_layers: int) -> ModelConfig:
    """The first layers of a shape that has at least `num_layers`."""
    assert num_layers <= config.num_layers
    sliding = config.sliding_layers
    return msgspec.structs.replace(
        config,
        num_layers=num_layers,
        sliding_layers=None if sliding is None else [layer for layer in sliding if layer < num_layers],
        layers_without_rope=[layer for layer in config.layers_without_rope if layer < num_layers],
    )
