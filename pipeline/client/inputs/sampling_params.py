"""How a client asks for tokens to be drawn and text to be cut: the names, meanings and defaults are vLLM's."""

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from pipeline.client.inputs.structured_params import StructuredOutputsParams

MAX_TEMPERATURE = 2.0
MAX_PENALTY = 2.0
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100.0
MAX_BIAS = 100.0
MAX_STOP_CHARS = 256
"""Of a stop string, and of an entry of bad_words."""
MAX_INT32 = 2**31 - 1
MOST = {
    "n": 65536,
    "best_of": 65536,
    "logprobs": 1024,
    "stop_strings": 4096,
    "stop_token_ids": 4096,
    "logit_bias": 65536,
    "bad_words": 65536,
}
"""What no server takes; a server's settings `limits.*` may be lower, and by default are."""


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
    spaces_between_special_tokens: bool = True
    """Changes nothing: no vocabulary that is served has spaces put between its special tokens."""
    repetition_penalty: float = 1.0
    """0.01 to 100. Above 1 makes ids of the prompt and the output less likely."""
    presence_penalty: float = 0.0
    """-2 to 2. Above 0 makes ids of the output less likely."""
    frequency_penalty: float = 0.0
    """-2 to 2. As `presence_penalty`, as many times as they occur."""
    logit_bias: dict[int, float] | None = None
    """Ids, and what is added to their logits: -100 to 100; kept as a dict."""
    allowed_token_ids: list[int] | None = None
    """No other ids are drawn: at least one; None allows all."""
    bad_words: list[str] | None = None
    """Texts that the output never has; kept as a list."""
    min_tokens: int = 0
    """Output ids before which nothing ends a sequence."""
    truncate_prompt_tokens: int | None = None
    """Keep this many of the prompt's last ids; -1: as many as fit; None keeps all."""
    logprobs: int | None = None
    """`CompletionOutput.logprobs` has the log probability of each id, and of so many of the likeliest in its place."""
    prompt_logprobs: int | None = None
    """`RequestOutput.prompt_logprobs` has the same of the prompt's ids."""
    structured_outputs: StructuredOutputsParams | None = None
    """What the output is to match."""

    @property
    def num_sequences(self) -> int:
        """How many are generated."""
        return self.best_of or self.n

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_options()
        self._keep_lists()

    def _check_numbers(self) -> None:
        _integer("n", self.n, 1, MOST["n"])
        if self.best_of is not None:
            _integer("best_of", self.best_of, self.n, MOST["best_of"])
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
        _number("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
        for name in ("presence_penalty", "frequency_penalty"):
            _number(name, getattr(self, name), -MAX_PENALTY, MAX_PENALTY)
        _integer("min_tokens", self.min_tokens, 0, MAX_INT32)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens = {self.max_tokens}, not {self.min_tokens}")
        if self.truncate_prompt_tokens is not None:
            _integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, MAX_INT32)
            if self.truncate_prompt_tokens == 0:
                raise ValueError("truncate_prompt_tokens must be -1 or at least 1, not 0")
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                _integer(name, value, 0, MOST["logprobs"])

    def _check_options(self) -> None:
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise TypeError(
                f"structured_outputs must be StructuredOutputsParams, not {_shown(self.structured_outputs)}"
            )
        flags = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "spaces_between_special_tokens")
        for name in flags:
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, not {_shown(value)}")

    def _keep_lists(self) -> None:
        """Check the lists, and keep each in one form: the struct is frozen for all others."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        kept: dict[str, Any] = {
            "stop": _texts("stop", stop, MOST["stop_strings"]),
            "stop_token_ids": _ids("stop_token_ids", self.stop_token_ids or [], MOST["stop_token_ids"]),
            "bad_words": _texts("bad_words", self.bad_words, MOST["bad_words"]),
            "logit_bias": _bias(self.logit_bias),
        }
        if self.allowed_token_ids is not None:
            kept["allowed_token_ids"] = _ids("allowed_token_ids", self.allowed_token_ids, MAX_INT32)
            if not kept["allowed_token_ids"]:
                raise ValueError("allowed_token_ids must hold at least one id; None allows all")
        for name, value in kept.items():
            msgspec.structs.force_setattr(self, name, value)


def _texts(name: str, texts: Any, most: int) -> list[str]:
    if texts is None:
        return []
    if not isinstance(texts, (list, tuple)) or not all(isinstance(one, str) for one in texts):
        raise TypeError(f"{name} must be a {'string or a ' * (name == 'stop')}list of strings, not {_shown(texts)}")
    if len(texts) > most:
        raise ValueError(f"{name} must hold at most {most} strings, not {len(texts)}")
    for one in texts:
        if not 1 <= len(one) <= MAX_STOP_CHARS:
            raise ValueError(f"{name} must hold strings of 1 to {MAX_STOP_CHARS} characters, not one of {len(one)}")
    return list(texts)


def _ids(name: str, ids: Any, most: int) -> list[int]:
    if not isinstance(ids, (list, tuple)):
        raise TypeError(f"{name} must be a list of integers, not {_shown(ids)}")
    if len(ids) > most:
        raise ValueError(f"{name} must hold at most {most} ids, not {len(ids)}")
    for place, one in enumerate(ids):
        _integer(f"{name}[{place}]", one, 0, MAX_INT32)
    return list(ids)


def _bias(bias: Any) -> dict[int, float]:
    """vLLM takes the ids as integers, and OpenAI's clients write them as strings."""
    if bias is None:
        return {}
    if not isinstance(bias, Mapping):
        raise TypeError(f"logit_bias must be a dict of ids and numbers, not {_shown(bias)}")
    if len(bias) > MOST["logit_bias"]:
        raise ValueError(f"logit_bias must hold at most {MOST['logit_bias']} ids, not {len(bias)}")
    read: dict[int, float] = {}
    for key, value in bias.items():
        is_number = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10
        token_id = int(key) if is_number else key
        _integer("logit_bias must have token ids as keys: each", token_id, 0, MAX_INT32)
        _number(f"logit_bias[{token_id}]", value, -MAX_BIAS, MAX_BIAS)
        read[token_id] = value
    return read


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
