"""Reads the rotary embedding of a config.json: its base, its scaling for long contexts, and the part of a head that is
rotated."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from pipeline.runtime.model.rope import (
    LinearRope,
    Llama3Rope,
    LongRope,
    ProportionalRope,
    Rope,
    RopeScaling,
    YarnRope,
)
from pipeline.stages.prepare.families.keys import ConfigFault, Keys
from pipeline.stages.prepare.files import shown
from pipeline.stages.prepare.shape import MAX_COUNT, as_float

PART = "partial_rotary_factor"
BY_LAYER = ("full_attention", "sliding_attention")
KINDS = ("default", "llama3", "linear", "yarn", "longrope", "proportional")


@dataclass(frozen=True, slots=True)
class Ropes:
    """The rotary embeddings of a model."""

    main: Rope
    sliding: Rope
    """Of layers with a sliding window."""
    part: float
    """The part of a head's dimensions that is rotated."""

    def rotary_dim(self, head_dim: int) -> int | None:
        """The number of dimensions that are rotated; None if all are."""
        return None if self.part == 1 else int(head_dim * self.part)


def read_ropes(keys: Keys) -> Ropes:
    """`rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling`, which take precedence as they do in
    transformers. Raises ConfigFault for scalings that are not supported."""
    key, rope = rope_of(keys)
    local = keys.get("rope_local_base_freq", (int, float))
    if keys.has_default("rope_by_layer") and any(isinstance(rope.get(kind), dict) for kind in BY_LAYER):
        main, sliding = (rope.get(kind) or {} for kind in BY_LAYER)
        unknown = [name for name in rope if name not in BY_LAYER]
        if unknown or not isinstance(main, dict) or not isinstance(sliding, dict):
            raise ConfigFault(f"{key} has parameters by layer; they must be objects for {' and '.join(BY_LAYER)}")
    else:
        if by_layer := next((name for name, value in rope.items() if isinstance(value, dict)), None):
            raise ConfigFault(f"{key} has separate parameters for {shown(by_layer)}: not supported")
        main = rope
        # In old files of models with two kinds of layers, the scaling is that of full attention.
        sliding = {} if keys.has_default("rope_by_layer") else rope
    main_rope = Rope(_theta(main, key, keys), _scaling(main, key, keys))
    local_theta = _theta(sliding, key, keys) if local is None or "rope_theta" in sliding else as_float(local)
    sliding_rope = Rope(local_theta, _scaling(sliding, key, keys))
    part, name = keys.get(PART, (int, float), 1.0), keys.name(PART)
    if isinstance(main_rope.scaling, ProportionalRope):
        return Ropes(main_rope, sliding_rope, 1.0)
    if PART in main:
        part, name = main[PART], f"{key}.{PART}"
    if not isinstance(part, int | float) or isinstance(part, bool) or not 0 < part <= 1:
        raise ConfigFault(f"{name} is {shown(part)}; it must be a number above 0, up to 1")
    if part != 1 and not keys.has_default("partial_rotary_factor"):
        raise ConfigFault(f"partial_rotary_factor is {shown(part)}: partial rotary embedding is not supported")
    return Ropes(main_rope, sliding_rope, float(part))


def rope_axes(keys: Keys, rotary_dim: int) -> list[int] | None:
    """`ModelConfig.rope_axes`; None if the model has no M-RoPE. Raises ConfigFault."""
    interleaved = keys.get("mrope_interleaved", bool)
    if interleaved is None:
        return None
    key, rope = rope_of(keys)
    given = rope.get("mrope_section")
    section, half = keys.get("mrope_section", list) if given is None else given, rotary_dim // 2
    is_valid = isinstance(section, list) and len(section) == 3 and all(type(one) is int and one >= 0 for one in section)
    # Axes that take turns end with the pairs, as in transformers.
    if not is_valid or (not interleaved and sum(section) != half):
        raise ConfigFault(f"{key} has mrope_section {shown(section)}; it must be three integers whose sum is {half}")
    axes = np.zeros(half, np.int64)
    if not interleaved:
        return np.repeat(np.arange(3), section).tolist()
    for axis in (1, 2):
        axes[axis : 3 * section[axis] : 3] = axis
    return axes.tolist()


def scaled_context(ropes: Ropes, keys: Keys, max_position: int) -> tuple[int, list[str]]:
    """The longest context, and a line if it is not `max_position_embeddings`.

    As in vLLM (`_get_and_verify_max_len`): YaRN scales the original context, which instructions for it leave in
    `max_position_embeddings`, and linear scaling multiplies that key. Gemma 3 has the product in it.
    """
    name = keys.name("max_position_embeddings")
    match ropes.main.scaling:
        case YarnRope(factor=factor, original_max_position=original) if (longer := original * factor) > max_position:
            what = f"YaRN scales {original} positions by {factor:g}"
        case LinearRope(factor=factor) if not keys.has_default("rope_by_layer") and factor > 1:
            longer = max_position * factor
            what = f"linear scaling divides positions by {factor:g}"
        case _:
            return max_position, []
    if not math.isfinite(longer) or longer > MAX_COUNT:
        raise ConfigFault(f"{name} is {max_position}, and {what}: the product must be at most {MAX_COUNT}")
    return int(longer), [f"the context is {int(longer)} tokens, although {name} is {max_position}: {what}"]


def rope_of(keys: Keys) -> tuple[str, dict[str, Any]]:
    """The key with the parameters of the rotary embedding, and its value or the architecture's default. Raises
    ConfigFault if it is not an object."""
    old = keys.get("rope_scaling", dict)
    return ("rope_scaling", old) if old else ("rope_parameters", keys.get("rope_parameters", dict) or {})


def _theta(rope: Mapping[str, Any], key: str, keys: Keys) -> float:
    if "rope_theta" in rope:
        return _number(rope["rope_theta"], f"{key}.rope_theta")
    if keys.is_null("rope_theta"):
        raise keys.fault("rope_theta", "a number, or absent for the architecture's default")
    return keys.number("rope_theta", 10000.0)


def _number(value: Any, name: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ConfigFault(f"{name} is {shown(value)}, not a number")
    return as_float(value)


def _scaling(rope: Mapping[str, Any], key: str, keys: Keys) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if "short_factor" in rope and kind in ("su", "yarn"):  # names that Phi-3 had for it
        kind = "longrope"
    match kind:
        case "default":
            return None
        case "llama3":
            return _llama3(rope, key, keys)
        case "linear":
            return LinearRope(_positive(rope, key, "factor"))
        case "yarn":
            return _yarn(rope, key, keys)
        case "longrope":
            return _longrope(rope, key, keys)
        case "proportional":
            part = _number(rope.get(PART, 1.0), f"{key}.{PART}")
            if not 0 < part <= 1:
                raise ConfigFault(f"{key} has {PART} {shown(part)}; it must be a number above 0, up to 1")
            return ProportionalRope(part=part, factor=_positive({"factor": 1.0, **rope}, key, "factor"))
    raise ConfigFault(f"{key} has rope_type {shown(kind)}; supported are {', '.join(map(repr, KINDS))}")


def _llama3(rope: Mapping[str, Any], key: str, keys: Keys) -> Llama3Rope:
    names = {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position": "original_max_position_embeddings",
    }
    if keys.has("original_max_position_embeddings"):  # takes precedence in transformers
        original = keys.get("original_max_position_embeddings", int)
        rope = {**rope, "original_max_position_embeddings": original}
    missing = [theirs for theirs in names.values() if theirs not in rope]
    if missing:
        raise ConfigFault(f"{key} of type 'llama3' lacks {missing[0]!r}")
    values = {ours: rope[theirs] for ours, theirs in names.items()}
    try:
        return msgspec.convert({"type": "llama3", **values}, Llama3Rope)
    except msgspec.ValidationError as error:
        raise ConfigFault(f"{key}: {error}") from error


def _yarn(rope: Mapping[str, Any], key: str, keys: Keys) -> YarnRope:
    original = original_context(rope, key, keys)
    factor = _factor(rope, key, keys, original)
    magnitude = rope.get("attention_factor")
    if magnitude is None:
        scale, scale_all = (_number(rope.get(name) or 0, name) for name in ("mscale", "mscale_all_dim"))
        magnitude = _mscale(factor, scale) / _mscale(factor, scale_all) if scale and scale_all else _mscale(factor, 1)
    truncate = rope.get("truncate", True)
    return YarnRope(
        factor=factor,
        original_max_position=original,
        magnitude=_number(magnitude, "attention_factor"),
        beta_fast=_number(rope.get("beta_fast") or 32.0, "beta_fast"),
        beta_slow=_number(rope.get("beta_slow") or 1.0, "beta_slow"),
        truncate=bool(truncate),
    )


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(rope: Mapping[str, Any], key: str, keys: Keys) -> LongRope:
    original = original_context(rope, key, keys)
    factor = _factor(rope, key, keys, original)
    magnitude = rope.get("attention_factor")
    if magnitude is None:
        magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    lists = {}
    for name in ("short_factor", "long_factor"):
        numbers = rope.get(name)
        if not isinstance(numbers, list) or not numbers:
            raise ConfigFault(f"{key} of type 'longrope' has {name} {shown(numbers)}; it must be a list of numbers")
        lists[name] = tuple(_number(number, name) for number in numbers)
    return LongRope(
        original_max_position=original,
        magnitude=_number(magnitude, "attention_factor"),
        short_factors=lists["short_factor"],
        long_factors=lists["long_factor"],
    )


def original_context(rope: Mapping[str, Any], key: str, keys: Keys) -> int:
    """The context that a model was trained with before its rotary embedding was scaled: beside `rope`, where it takes
    precedence in transformers, in it, or the whole context."""
    name = "original_max_position_embeddings"
    outer = keys.get(name, int)
    value = outer if outer is not None else rope.get(name, keys.get("max_position_embeddings", int))
    if not isinstance(value, int) or isinstance(value, bool) or value < 2:
        raise ConfigFault(f"{key} has {name} {shown(value)}; it must be an integer above 1")
    return value


def _factor(rope: Mapping[str, Any], key: str, keys: Keys, original: int) -> float:
    """`factor`; if absent, that of the context."""
    if rope.get("factor") is not None:
        return _positive(rope, key, "factor")
    return as_float(keys.get("max_position_embeddings", int, original)) / original


def _positive(rope: Mapping[str, Any], key: str, name: str) -> float:
    value = _number(rope.get(name), f"{key}.{name}")
    if not value > 0 or not math.isfinite(value):
        raise ConfigFault(f"{key} has {name} {shown(rope.get(name))}; it must be a positive number")
    return value
