"""The scaling of a .gguf file's rotary embedding for long contexts: linear, or YaRN.

That of Llama 3 and LongRoPE are tensors of the file, see model.py. As in llama.cpp, the context is the file's
`context_length`, whatever the scaling.
"""

import math
from collections.abc import Collection

from pipeline.runtime.model.model_config import LinearRope, RopeScaling, YarnRope
from pipeline.stages.prepare.files import shown
from pipeline.stages.prepare.gguf.metadata import Metadata, shortest
from pipeline.stages.prepare.shape import as_float
from pipeline.stages.prepare.sources.source import ModelError

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
