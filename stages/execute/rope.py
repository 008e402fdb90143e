"""Rotary frequencies, optionally with Llama 3.1's scaling for long contexts."""

import math

import numpy as np

from pipeline.kernels.logprob_inputs import FloatArray
from pipeline.runtime.model_folder import Llama3Rope


def rope_frequencies(head_dim: int, theta: float, scaling: Llama3Rope | None) -> FloatArray:
    """Radians per position for each pair of dimensions: [head_dim / 2] float32.

    Each operation is rounded to float32, as in transformers, whose rounding the models were trained with.
    """
    exponents = np.arange(0, head_dim, 2).astype(np.float32) / np.float32(head_dim)
    # numpy's power in float32 is up to two units off; this one is rounded correctly, and torch's nearly always.
    powers = np.power(np.float64(theta), exponents.astype(np.float64)).astype(np.float32)
    frequencies: FloatArray = np.float32(1) / powers
    return frequencies if scaling is None else scale_llama3(frequencies, scaling)


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


def rope_table(frequencies: FloatArray, max_model_len: int) -> tuple[FloatArray, FloatArray]:
    """Cosines and sines of every position: [max_model_len, head_dim / 2] float32 each, rounded correctly."""
    angles = np.multiply.outer(np.arange(max_model_len, dtype=np.float32), frequencies).astype(np.float64)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
