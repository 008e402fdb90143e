"""Norms of hidden states."""

import numpy as np

from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.program import Norm
from pipeline.stages.execute.weights import Weights


def norm_weights(config: ModelConfig, weights: Weights, name: str) -> Norm:
    """The norm of hidden states that Llama would call `name`."""
    size = config.hidden_size
    if not config.norm_weights:
        return Norm(np.ones(size, np.float32))
    weight = weights.vector(f"{name}.weight", size)
    if config.norm_offset:
        weight = weight + config.norm_offset
    return Norm(weight, weights.vector(f"{name}.bias", size) if config.norm_bias else None)
