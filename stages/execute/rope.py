"""Rotary frequencies, optionally with Llama 3.1's scaling for long contexts."""

import math

import torch
from torch import Tensor

from pipeline.runtime.model_folder import Llama3Rope


def rope_frequencies(head_dim: int, theta: float, scaling: Llama3Rope | None) -> Tensor:
    """Radians per position for each pair of dimensions: [head_dim / 2] float32."""
    frequencies = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    return frequencies if scaling is None else scale_llama3(frequencies, scaling)


def scale_llama3(frequencies: Tensor, scaling: Llama3Rope) -> Tensor:
    """Divide low frequencies by `factor`, keep high ones, and interpolate between.

    As in Meta's reference code for Llama 3.1 (llama_models, `apply_scaling`), by the number of periods within the
    original context.
    """
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = ramp.clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor
