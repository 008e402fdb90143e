"""Checks a ModelConfig for consistency, independent of the file format that it came from."""

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

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
from pipeline.runtime.model.special_layers import Experts
from pipeline.stages.prepare.files import shown
from pipeline.stages.prepare.sources.source import ModelError

MAX_COUNT = 2**31 - 1
"""Ids and positions are 32-bit numbers."""
MAX_LAYERS = 10_000
"""Rejects absurd configs before every layer's tensors are looked up by name."""

HALVES = ": one for each pair of the head_dim * partial_rotary_factor dimensions"

MAX_EXPERTS = 200_000
"""Experts of all layers: each has three tensors with names of their own."""

COUNTS = (
    *("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads"),
    *("head_dim", "vocab_size", "max_position", "sliding_window"),
)


def check_shape(config: ModelConfig, path: Path, keys: Mapping[str, str]) -> None:
    """Raises ModelError, naming `path` and the key, if the config is inconsistent.

    `keys` maps fields of `ModelConfig` to their names in `path`; fields that it lacks have the same name there.
    """

    def require(holds: bool, field: str, value: Any, words: str) -> None:
        if not holds:
            raise ModelError(f"{path}: {keys.get(field, field)} is {shown(value)}; it must be {words}")

    for field in COUNTS:
        count = getattr(config, field)
        most = MAX_LAYERS if field == "num_layers" else MAX_COUNT
        if count is not None:  # sliding_window may be None
            require(1 <= count <= most, field, count, f"an integer from 1 to {most}")
    heads = config.num_heads
    require(
        heads % config.num_kv_heads == 0,
        "num_kv_heads",
        config.num_kv_heads,
        f"a divisor of {keys.get('num_heads', 'num_heads')} = {heads}",
    )
    require(config.head_dim % 2 == 0, "head_dim", config.head_dim, "even: rotary embeddings rotate pairs")
    require(
        math.isfinite(config.rms_norm_eps) and config.rms_norm_eps > 0,
        "rms_norm_eps",
        config.rms_norm_eps,
        "a positive number",
    )
    dim = config.head_dim if config.rotary_dim is None else config.rotary_dim
    require(
        0 <= dim <= config.head_dim and dim % 2 == 0,
        "rotary_dim",
        dim,
        f"even, and at most head_dim = {config.head_dim}",
    )
    for field in ("embedding_scale", "residual_multiplier", "logit_scale", "query_growth", "query_scale"):
        number = getattr(config, field)
        require(number is None or math.isfinite(number), field, number, "a finite number")
    if config.experts is not None:
        _check_experts(config, config.experts, require, keys.get("num_experts", "num_experts"))
    for field in ("attention_softcap", "logit_softcap", "swiglu_limit"):
        number = getattr(config, field)
        require(number is None or (math.isfinite(number) and number > 0), field, number, "a positive number")
    for rope in (Rope(config.rope_theta, config.rope_scaling), config.sliding_rope):
        if rope is not None:
            require(math.isfinite(rope.theta) and rope.theta > 0, "rope_theta", rope.theta, "a positive number")
            if rope.scaling is not None:
                _check_scaling(rope.scaling, rope.theta, dim, require)


Require = Callable[[bool, str, Any, str], None]


def _check_experts(config: ModelConfig, experts: Experts, require: Require, num_key: str) -> None:
    for field in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
        count = {
            "num_experts": experts.num,
            "num_experts_per_tok": experts.num_per_token,
            "moe_intermediate_size": experts.intermediate_size,
        }[field]
        most = {"num_experts": MAX_EXPERTS // config.num_layers, "num_experts_per_tok": experts.num}.get(
            field, MAX_COUNT
        )
        require(1 <= count <= most, field, count, f"an integer from 1 to {most}")
    inner = experts.shared_intermediate_size
    require(0 <= inner <= MAX_COUNT, "shared_expert_intermediate_size", inner, f"an integer up to {MAX_COUNT}")
    groups = experts.num_groups
    require(
        groups >= 1 and experts.num % groups == 0,
        "n_group",
        groups,
        f"a divisor of {num_key} = {experts.num}",
    )
    size, kept = experts.num // groups, experts.groups_per_token
    require(1 <= kept <= groups, "topk_group", kept, f"an integer from 1 to n_group = {groups}")
    if groups > 1:
        best, count = experts.best_of_group, experts.num_per_token
        require(size >= best, "n_group", groups, f"at most {experts.num // best}: a group has at least {best} experts")
        most = kept * size
        require(count <= most, "num_experts_per_tok", count, f"at most {most}, the experts of topk_group groups")
    require(not config.parallel, "experts", experts.num, "absent in a model with parallel layers")
    softcap = experts.softcap
    require(0 <= softcap < math.inf, "moe_router_logit_softcapping", softcap, "a finite number of at least 0")
    require(math.isfinite(experts.scale), "routed_scaling_factor", experts.scale, "a finite number")


def _check_scaling(rope: RopeScaling, theta: float, dim: int, require: Require) -> None:
    for field in ("factor", "low_freq_factor", "high_freq_factor", "magnitude", "beta_fast", "beta_slow"):
        number = getattr(rope, field, 1.0)
        require(math.isfinite(number) and number > 0, field, number, "a positive number")
    if isinstance(rope, LinearRope | ProportionalRope):
        return
    original = rope.original_max_position
    require(0 < original <= MAX_COUNT, "original_max_position", original, f"a positive number up to {MAX_COUNT}")
    match rope:
        case Llama3Rope():
            low, high = rope.low_freq_factor, rope.high_freq_factor
            require(high > low, "high_freq_factor", high, f"above low_freq_factor = {low}")
        case YarnRope():
            require(theta > 1, "rope_theta", theta, "above 1")
        case LongRope():
            for name, factors in (("short_factor", rope.short_factors), ("long_factor", rope.long_factors)):
                require(len(factors) == dim // 2, name, list(factors), f"a list of {dim // 2} numbers{HALVES}")
                require(
                    all(math.isfinite(factor) and factor > 0 for factor in factors), name, list(factors), "positive"
                )


def as_float(number: float) -> float:
    """A JSON number as a float; infinity if it is an integer too large for one."""
    try:
        return float(number)
    except OverflowError:
        return math.inf


def check_ids(ids: Iterable[int], vocab_size: int, path: Path, key: str) -> None:
    """Raises ModelError, naming `path` and `key`, if an id is outside the vocabulary."""
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise ModelError(
                f"{path}: {key} is {shown(token_id)}; it must be an id of the vocabulary, 0 to {vocab_size - 1}"
            )


def derived_head_dim(hidden_size: int, num_heads: int, path: Path, keys: Mapping[str, str]) -> int:
    """head_dim if the file lacks it. Raises ModelError if hidden_size is not a multiple of the number of heads."""
    if num_heads < 1 or hidden_size % num_heads:
        hidden, heads, size = (keys.get(field, field) for field in ("hidden_size", "num_heads", "head_dim"))
        raise ModelError(
            f"{path}: {hidden} is {shown(hidden_size)}; it must be a multiple of {heads} = {shown(num_heads)}, or the "
            f"file must have {size}"
        )
    return hidden_size // num_heads
