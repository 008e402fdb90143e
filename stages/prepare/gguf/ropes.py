"""The scaling of a .gguf file's rotary embedding for long contexts: linear, YaRN, or Llama 3's.

That of LongRoPE is tensors of the file, see model.py. As in llama.cpp, the context is the file's
`context_length`, whatever the scaling.
"""

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np

from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.rope import LinearRope, Llama3Rope, RopeScaling, YarnRope
from pipeline.stages.prepare.files import shown
from pipeline.stages.prepare.gguf.file import GgufTensor
from pipeline.stages.prepare.gguf.metadata import Metadata, shortest
from pipeline.stages.prepare.shape import as_float
from pipeline.stages.prepare.sources.source import ModelError

ROPE_FREQUENCIES = "rope_freqs.weight"
NONE, LINEAR, YARN, LONGROPE = "none", "linear", "yarn", "longrope"


def read_scaling(
    metadata: Metadata, name: str, max_position: int, *, refused: Collection[str] = (), truncate: bool = True
) -> RopeScaling | None:
    """The scaling of a file with the architecture `name`; None without one, and for LongRoPE. `truncate` is YaRN's.

    Raises ModelError for other types and for those in `refused`.
    """
    prefix = f"{name}.rope.scaling"
    kind = metadata.get(f"{prefix}.type", str)
    key = f"{prefix}.factor"
    factor = metadata.get(key, (int, float))
    if factor is None and (old := metadata.get(f"{name}.rope.scale_linear", (int, float))) is not None:
        key, factor = f"{name}.rope.scale_linear", old
    factor = shortest(as_float(factor or 1.0))  # 0 is none in llama.cpp
    kind = (LINEAR if factor != 1 else NONE) if kind is None else kind
    if kind not in (NONE, LINEAR, YARN, LONGROPE) or (kind in refused and factor != 1):
        raise ModelError(f"{metadata.path}: {prefix}.type is {shown(kind)}: this rope scaling is not supported")
    if kind == LONGROPE and factor != 1:
        raise ModelError(f"{metadata.path}: {key} is {factor:g}: with LongRoPE, 1 is supported")
    if not factor > 0 or not math.isfinite(factor):
        raise ModelError(f"{metadata.path}: {key} is {factor:g}; it must be a positive number")
    if factor == 1 or kind in (NONE, LONGROPE):
        return None
    if kind == LINEAR:
        return LinearRope(factor)
    original = metadata.get(f"{prefix}.original_context_length", int) or max_position
    if original < 2:
        raise ModelError(f"{metadata.path}: {prefix}.original_context_length is {shown(original)}; it must be above 1")
    attention = shortest(metadata.get(f"{prefix}.attn_factor", float) or 1.0)
    fast, slow = (
        shortest(metadata.get(f"{prefix}.yarn_beta_{end}", float) or default)
        for end, default in (("fast", 32.0), ("slow", 1.0))
    )
    return YarnRope(
        factor=factor,
        original_max_position=original,
        magnitude=attention * (1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0),
        beta_fast=fast,
        beta_slow=slow,
        truncate=truncate,
    )


def with_rope_scaling(config: ModelConfig, tensor: GgufTensor, path: Path) -> ModelConfig:
    """The config with Llama 3's rope scaling, if the file's divisors of the frequencies match it.

    Raises ModelError for any other scaling: GGUF stores only the divisors.
    """
    shape = (config.head_dim // 2,)
    if tensor.kind != gguf.GGMLQuantizationType.F32 or tensor.shape != shape:
        raise ModelError(
            f"{path}: tensor {ROPE_FREQUENCIES} is {tensor.kind.name} of shape {tensor.shape}; it must be F32 {shape}"
        )
    factors = tensor.data.view("<f4")
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise ModelError(f"{path}: tensor {ROPE_FREQUENCIES} has values that are not positive")
    factor = float(factors.max())
    if np.allclose(factors, 1.0):
        return config
    if config.rope_scaling is not None:
        raise ModelError(f"{path}: {ROPE_FREQUENCIES} beside another rope scaling is not supported")
    rope = Llama3Rope(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
    if not np.allclose(factors, llama3_divisors(config, rope), rtol=1e-3):
        raise ModelError(f"{path}: {ROPE_FREQUENCIES} is not Llama 3's rope scaling, the only supported one")
    return msgspec.structs.replace(config, rope_scaling=rope)


def llama3_divisors(config: ModelConfig, rope: Llama3Rope) -> "np.ndarray[Any, Any]":
    """Divisors of the rotary frequencies, [head_dim / 2]: 1 for short wavelengths, `factor` for long ones, interpolated
    between (`_compute_llama3_parameters` in transformers, `rope_freqs` in llama.cpp's converter)."""
    frequencies = config.rope_theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    turns = rope.original_max_position * frequencies / (2 * np.pi)
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    divisors: np.ndarray[Any, Any] = 1.0 / (smooth + (1.0 - smooth) / rope.factor)
    return divisors
