"""How a client asks for tokens to be drawn and text to be cut: the names, meanings and defaults are vLLM's."""

import math
from typing import Any

import msgspec

MAX_N = 128
MAX_TEMPERATURE = 2.0
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 128
MAX_INT32 = 2**31 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Checked when it is made: raises TypeError or ValueError that names the field and says what would be right."""

    n: int = 1
    """Sequences to return for one prompt."""
    best_of: int | None = None
    """Sequences to generate, of which the n with the highest log probability per output id are returned, the best first
    and all at the end; None: n."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 and -1 are off."""
    min_p: float = 0.0
    seed: int | None = None
    """A 64-bit integer; None has the server draw one."""
    max_tokens: int | None = 16
    """Output ids of each sequence at most; None: as many as fit the model."""
    stop: str | list[str] | None = None
    """Strings that end the text; kept as a list."""
    stop_token_ids: list[int] | None = None
    """Ids that end a sequence, besides the model's own; kept as a list."""
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    @property
    def num_sequences(self) -> int:
        """How many are generated."""
        return self.best_of or self.n

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        if self.best_of is not None:
            _integer("best_of", self.best_of, self.n, MAX_N)
        _number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise ValueError("top_p must be above 0 and at most 1, not 0")
        _integer("top_k", self.top_k, -1, MAX_INT32)
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, MAX_INT32)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, not {_shown(value)}")
        # Frozen for everybody else: one form of each is kept.
        msgspec.structs.force_setattr(self, "stop", _stops(self.stop))
        msgspec.structs.force_setattr(self, "stop_token_ids", _stop_ids(self.stop_token_ids))


def _stops(stop: Any) -> list[str]:
    if stop is None:
        return []
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, (list, tuple)) or not all(isinstance(one, str) for one in stops):
        raise TypeError(f"stop must be a string or a list of strings, not {_shown(stop)}")
    if len(stops) > MAX_STOP_STRINGS:
        raise ValueError(f"stop must hold at most {MAX_STOP_STRINGS} strings, not {len(stops)}")
    for one in stops:
        if not 1 <= len(one) <= MAX_STOP_CHARS:
            raise ValueError(f"stop must hold strings of 1 to {MAX_STOP_CHARS} characters, not one of {len(one)}")
    return list(stops)


def _stop_ids(ids: Any) -> list[int]:
    if ids is None:
        return []
    if not isinstance(ids, (list, tuple)):
        raise TypeError(f"stop_token_ids must be a list of integers, not {_shown(ids)}")
    if len(ids) > MAX_STOP_IDS:
        raise ValueError(f"stop_token_ids must hold at most {MAX_STOP_IDS} ids, not {len(ids)}")
    for place, one in enumerate(ids):
        _integer(f"stop_token_ids[{place}]", one, 0, MAX_INT32)
    return list(ids)


def _integer(name: str, value: Any, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not {_shown(value)}")
    if not least <= value <= most:
        raise ValueError(f"{name} must be from {least} to {most}, not {value}")


def _number(name: str, value: Any, least: float, most: float) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, not {_shown(value)}")
    if not (math.isfinite(value) and least <= value <= most):
        raise ValueError(f"{name} must be from {least:g} to {most:g}, not {value:g}")


def _shown(value: Any) -> str:
    words = repr(value)
    return words if len(words) <= 100 else words[:99] + "…"
