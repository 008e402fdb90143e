"""What is subtracted from the keys of a layer before they are rounded to 8 bits, on a CPU also to bfloat16.

Some models (Qwen2) have biases of keys that are tens of times as large as the rest, mostly in dimensions that hardly
rotate. Such a key, or a scale for it, leaves few bits for the rest. A softmax stays the same if a number is added to
all scores of a query, so a vector that is the same for all keys of a head can be subtracted (Zhang et al., 2024,
arXiv:2410.02367, subtract the mean of all keys, which isn't known while they are written).
"""

import math

import numpy as np

from pipeline.kernels.sampling.logprob_inputs import FloatArray
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.layers.rope import rotation
from pipeline.stages.execute.program import AttentionWeights

NEAR = 256
"""Positions are weighed by 1 / (position + NEAR), because every sequence has the first ones."""
NUM_POSITIONS = 1024
"""Positions that stand for all."""


def allows_center(config: ModelConfig) -> bool:
    """Whether only differences between the scores of a query matter. A cap of scores depends on their size, and so does
    the weight of an attention sink."""
    return config.attention_softcap is None and not config.sinks


def key_center(config: ModelConfig, weights: AttentionWeights, max_model_len: int) -> FloatArray | None:
    """The weighted mean of a layer's key biases at all positions of the model's context after their rotary embedding,
    [num_kv_heads, head_dim] float32. None if keys have no bias, or a norm after it, or allow no center.
    `max_model_len` only selects the frequencies of LongRoPE."""
    bias = weights.qkv.bias
    if bias is None or not weights.has_keys or weights.head_norms is not None or not allows_center(config):
        return None
    heads = weights.heads
    first, size = heads.query_size, heads.kv_size
    keys = np.asarray(bias, np.float64)[first : first + size].reshape(heads.num_kv, 2, -1)
    turning = rotation(config, weights.rope, weights.heads.dim, max_model_len)
    # Equally spaced logarithms of position + NEAR have these weights.
    logarithms = np.linspace(math.log(NEAR), math.log(NEAR + config.max_position), NUM_POSITIONS)
    angles = np.multiply.outer(np.exp(logarithms) - NEAR, turning.frequencies.astype(np.float64))
    magnitudes = np.float64(1) if turning.magnitudes is None else turning.magnitudes.astype(np.float64)
    cos, sin = np.cos(angles).mean(0) * magnitudes, np.sin(angles).mean(0) * magnitudes
    low, high = keys[:, 0], keys[:, 1]
    center = np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=1)
    return center.astype(np.float32)
