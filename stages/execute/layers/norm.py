"""Norms of hidden states."""

from dataclasses import replace

import numpy as np

from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.program import Norm
from pipeline.stages.execute.weights import Weights


def norm_weights(config: ModelConfig, weights: Weights, name: str) -> Norm:
    """The norm of hidden states that Llama would call `name`."""
    if not config.norm_weights:
        return plain_norm(config)
    size = config.hidden_size
    weight, offset = weights.vector(f"{name}.weight", size), config.norm_offset
    if name == "model.norm" and config.last_norm_offset is not None:
        offset = config.last_norm_offset
    if offset:
        weight = weight + offset
    return Norm(weight, weights.vector(f"{name}.bias", size) if config.norm_bias else None)


def post_norm_weights(config: ModelConfig, weights: Weights, name: str) -> Norm:
    """The same of a norm after attention or the feed-forward layer."""
    return replace(norm_weights(config, weights, name), eps=config.post_norm_eps)


def plain_norm(config: ModelConfig) -> Norm:
    """A norm without weights."""
    return Norm(np.ones(config.hidden_size, np.float32))
