"""Whether the numbers that describe a model go together, whichever kind of file they were read from."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipeline.runtime.model_folder import ModelConfig
from pipeline.stages.prepare.files import shown
from pipeline.stages.prepare.sources.source import ModelError

MAX_COUNT = 2**31 - 1
"""Ids and positions are 32-bit numbers."""
MAX_LAYERS = 10_000
"""Every layer is looked for by name; a config that asks for a billion of them is answered before that."""

COUNTS = (
    *("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads"),
    *("head_dim", "vocab_size", "max_position", "sliding_window"),
)


def check_shape(config: ModelConfig, path: Path, keys: Mapping[str, str]) -> None:
    """Raises ModelError, naming `path` and the key, where no model can be like that.

    `keys` gives what `path` calls a field of `ModelConfig`; a field that isn't there is called as in `ModelConfig`.
    """

    def require(holds: bool, field: str, value: Any, words: str) -> None:
        if not holds:
            raise ModelError(f"{path}: {keys.get(field, field)} is {shown(value)}; it must be {words}")

    for field in COUNTS:
        count = getattr(config, field)
        most = MAX_LAYERS if field == "num_layers" else MAX_COUNT
        if count is not None:  # no sliding window
            require(1 <= count <= most, field, count, f"a whole number from 1 to {most}")
    heads = config.num_heads
    require(
        heads % config.num_kv_heads == 0,
        "num_kv_heads",
        config.num_kv_heads,
        f"a divisor of {keys.get('num_heads', 'num_heads')} = {heads}",
    )
    require(config.head_dim % 2 == 0, "head_dim", config.head_dim, "even: rotation turns pairs of numbers")
    for field in ("rms_norm_eps", "rope_theta"):
        number = getattr(config, field)
        require(math.isfinite(number) and number > 0, field, number, "a positive number")
    if config.rope_scaling is not None:
        rope = config.rope_scaling
        for field in ("factor", "low_freq_factor", "high_freq_factor"):
            number = getattr(rope, field)
            require(math.isfinite(number) and number > 0, field, number, "a positive number")
        original = rope.original_max_position
        require(0 < original <= MAX_COUNT, "original_max_position", original, f"a positive number up to {MAX_COUNT}")
        low = rope.low_freq_factor
        high = rope.high_freq_factor
        require(high > low, "high_freq_factor", high, f"above low_freq_factor = {low}")


def as_float(number: float) -> float:
    """A number of a JSON file; infinite where it is an integer beyond all floats."""
    try:
        return float(number)
    except OverflowError:
        return math.inf


def check_ids(ids: Iterable[int], vocab_size: int, path: Path, key: str) -> None:
    """Raises ModelError, naming `path` and `key`, where an id is not one of the model's vocabulary."""
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise ModelError(
                f"{path}: {key} is {shown(token_id)}; it must be in the vocabulary, whose ids go from 0 to "
                f"{vocab_size - 1}"
            )


def derived_head_dim(hidden_size: int, num_heads: int, path: Path, keys: Mapping[str, str]) -> int:
    """The size of a head where the file doesn't say it. Raises ModelError where the hidden size can't be divided so."""
    if num_heads < 1 or hidden_size % num_heads:
        hidden, heads, size = (keys.get(field, field) for field in ("hidden_size", "num_heads", "head_dim"))
        raise ModelError(
            f"{path}: {hidden} is {shown(hidden_size)}; it must be a multiple of {heads} = {shown(num_heads)}, or "
            f"{size} must be given"
        )
    return hidden_size // num_heads
