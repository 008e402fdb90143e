"""Rotary embedding: frequencies with their scalings for long contexts, and the order of a head's dimensions.

All kernels rotate dimension i with dimension i + head_dim / 2, for all dimensions of a head. Other models become that
when their weights are loaded: `head_order` moves the rows of queries and keys, which changes no score, and dimensions
that are not rotated have a frequency of 0.
"""

import math
from dataclasses import dataclass

import numpy as np

from pipeline.kernels.sampling.logprob_inputs import FloatArray
from pipeline.kernels.step_inputs import LongArray
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.rope import (
    LinearRope,
    Llama3Rope,
    LongRope,
    ProportionalRope,
    Rope,
    RopeScaling,
    YarnRope,
)


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotary embedding of some layers."""

    frequencies: FloatArray
    """Radians per position for each pair of dimensions: [head_dim / 2]; 0 for pairs that are not rotated."""
    magnitudes: FloatArray | None
    """Factors of the rotated pairs, [head_dim / 2]; None if all are 1."""


RopeKey = tuple[Rope | None, int]
"""A rotary embedding and the size of the heads that it rotates."""


def rotations(config: ModelConfig, max_model_len: int) -> dict[RopeKey, Rotation]:
    """The different rotary embeddings of a model, in the order of the layers."""
    layers = range(max(1, config.num_layers))
    found = dict.fromkeys((config.rope_of(layer), config.heads_of(layer).dim) for layer in layers)
    return {key: rotation(config, *key, max_model_len) for key in found}


def rotation(config: ModelConfig, rope: Rope | None, head_dim: int, max_model_len: int) -> Rotation:
    """The rotation of `rope` for sequences of up to `max_model_len` positions."""
    half = head_dim // 2
    frequencies = np.zeros(half, np.float32)
    if rope is None:
        return Rotation(frequencies, None)
    dim = rotary_dim(config, rope, head_dim)
    frequencies[: dim // 2] = rope_frequencies(dim, rope.theta, rope.scaling, max_model_len)
    magnitude = rope.scaling.magnitude if isinstance(rope.scaling, YarnRope | LongRope) else 1.0
    if magnitude == 1.0:
        return Rotation(frequencies, None)
    magnitudes = np.ones(half, np.float32)
    magnitudes[: dim // 2] = magnitude
    return Rotation(frequencies, magnitudes)


def rotary_dim(config: ModelConfig, rope: Rope | None, head_dim: int) -> int:
    """The first dimensions of a head that rotate."""
    if rope is not None and rope.dim is not None:
        return rope.dim
    return head_dim if config.rotary_dim is None else config.rotary_dim


def head_order(config: ModelConfig, rope: Rope | None) -> LongArray | None:
    """For each dimension of a head of queries or keys of a layer with this rotary embedding, its place in the weight
    files; None if they are the same."""
    head_dim = config.head_dim
    dim = rotary_dim(config, rope, head_dim)
    if dim == 0 or (dim == head_dim and not config.interleaved_rope):
        return None
    rotated = np.arange(dim)
    first, second = (rotated[::2], rotated[1::2]) if config.interleaved_rope else np.split(rotated, 2)
    left, right = np.split(np.arange(dim, head_dim), 2)
    order: LongArray = np.concatenate([first, left, second, right]).astype(np.int64)
    return order


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None, max_model_len: int = 0) -> FloatArray:
    """Radians per position for each pair of dimensions: [head_dim / 2] float32. Only LongRoPE depends on
    `max_model_len`.

    Each operation is rounded to float32, as in transformers, whose rounding the models were trained with.
    """
    exponents = np.arange(0, head_dim, 2).astype(np.float32) / np.float32(head_dim)
    # numpy's power in float32 is up to two units off; this one is rounded correctly, and torch's nearly always.
    powers = np.power(np.float64(theta), exponents.astype(np.float64)).astype(np.float32)
    frequencies: FloatArray = np.float32(1) / powers
    match scaling:
        case None:
            return frequencies
        case Llama3Rope():
            return scale_llama3(frequencies, scaling)
        case LinearRope():
            return frequencies / np.float32(scaling.factor)
        case ProportionalRope():
            frequencies[int(scaling.part * head_dim // 2) :] = 0
            return frequencies / np.float32(scaling.factor)
        case YarnRope():
            return scale_yarn(powers, scaling, theta)
        case LongRope():
            is_long = max_model_len > scaling.original_max_position
            factors = np.array(scaling.long_factors if is_long else scaling.short_factors, np.float32)
            divided: FloatArray = np.float32(1) / (factors * powers)
            return divided


def scale_yarn(powers: FloatArray, scaling: YarnRope, theta: float) -> FloatArray:
    """Keep high frequencies, divide low ones by `factor`, and interpolate between, by the number of periods within the
    original context. `powers` are the inverse frequencies. As in section 3.2 of the paper ("NTK-by-parts")."""
    num, dim = len(powers), 2 * len(powers)

    def pair_with(periods: float) -> float:
        return dim * math.log(scaling.original_max_position / (periods * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((np.arange(num, dtype=np.float32) - np.float32(low)) / np.float32(high - low)).clip(0, 1)
    kept, factor = np.float32(1) - ramp, np.float32(scaling.factor)
    scaled: FloatArray = np.float32(1) / (factor * powers) * (1 - kept) + np.float32(1) / powers * kept
    return scaled.astype(np.float32)


def scale_llama3(frequencies: FloatArray, scaling: Llama3Rope) -> FloatArray:
    """Divide low frequencies by `factor`, keep high ones, and interpolate between.

    As in Meta's reference code for Llama 3.1 (llama_models, `apply_scaling`), by the number of periods within the
    original context.
    """
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = ramp.clip(0, 1)
    scaled: FloatArray = kept * frequencies + (1 - kept) * frequencies / scaling.factor
    return scaled


def rope_table(
    frequencies: FloatArray, max_model_len: int, magnitudes: FloatArray | None = None
) -> tuple[FloatArray, FloatArray]:
    """Cosines and sines of every position: [max_model_len, head_dim / 2] float32 each, rounded correctly, times
    `magnitudes`."""
    angles = np.multiply.outer(np.arange(max_model_len, dtype=np.float32), frequencies).astype(np.float64)
    factors = np.float64(1) if magnitudes is None else magnitudes.astype(np.float64)
    return (np.cos(angles) * factors).astype(np.float32), (np.sin(angles) * factors).astype(np.float32)
