"""Sampling and stop fields of all routes that generate, and their checks. Pure.

Checks that are not in the types depend on the server: the settings in `COUNTED` bound lists, and ids must be in the
vocabulary. Lists are counted before their entries are processed.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from pipeline.client.protocol.generation import GenerationFields
from pipeline.client.protocol.sampling import MAX_BIAS, MAX_STOP_CHARS, SamplingFields
from pipeline.config.settings import LimitSettings as Caps
from pipeline.runtime import messages as m
from pipeline.runtime.model.generation_config import GenerationDefaults
from pipeline.stages.gateway.errors import ApiError, invalid
from pipeline.stages.gateway.parsing.parsed_request import RequestLimits
from pipeline.stages.gateway.parsing.structured_outputs import grammar_of

MAX_KEY_CHARS = 32
"""Characters that an error shows of an invalid key of logit_bias: there may be many."""
MAX_ALLOWED = 2**20
"""Entries of allowed_token_ids over all sequences of a request: a few vocabularies."""

COUNTED = {
    "stop": "max_stop_strings",
    "stop_token_ids": "max_stop_token_ids",
    "logit_bias": "max_logit_bias",
    "bad_words": "max_bad_words",
}
"""List fields, and the setting in `limits` that bounds each."""
_OPTIONS = frozenset(m.GenerationOptions.__struct_fields__) - {"seed"}
COPIED = tuple(name for name in SamplingFields.__struct_fields__ if name in _OPTIONS)
"""Fields that become the options of the same name. None is the option's default."""
DEFAULTED = tuple(name for name in GenerationDefaults.__struct_fields__ if name in COPIED)
"""Options that a model may have other defaults of."""
NO_DEFAULTS = GenerationDefaults()
_copied_of = attrgetter(*COPIED)


def check_counts(fields: SamplingFields, caps: Caps) -> None:
    """Check the lengths of lists. Raises ApiError."""
    for name, setting in COUNTED.items():
        value, most = getattr(fields, name), getattr(caps, setting)
        if isinstance(value, list | dict) and len(value) > most:
            message = f"'{name}' has {len(value)} entries, and the limit is {most} (limits.{setting})"
            raise invalid(name, message, "invalid_value")


def check_num_allowed(options: m.GenerationOptions, num_sequences: int) -> None:
    """Check the ids of all sequences together: many may start in one step. Raises ApiError."""
    num_ids = len(options.allowed_ids) // 4
    if num_ids * num_sequences > MAX_ALLOWED:
        message = (
            f"'allowed_token_ids' has {num_ids} entries for each of {num_sequences} sequences, and at most "
            f"{MAX_ALLOWED} are allowed in all: request fewer sequences"
        )
        raise invalid("allowed_token_ids", message, "invalid_value")


def generation_options(fields: GenerationFields, max_tokens: int | None, limits: RequestLimits) -> m.GenerationOptions:
    """The options that all routes share. Call `check_counts` first. Raises ApiError."""
    values = zip(COPIED, _copied_of(fields), strict=True)
    options: dict[str, Any] = {name: value for name, value in values if value is not None}
    if limits.defaults != NO_DEFAULTS:
        for name in DEFAULTED:
            options.setdefault(name, getattr(limits.defaults, name))
    for name in ("stop_token_ids", "logprob_token_ids"):
        if name in options:
            _check_ids(options[name], name, limits.vocab_size)
    if fields.logit_bias:
        bias = _bias(fields.logit_bias, limits.vocab_size)
        options |= {"bias_ids": list(bias), "bias_values": list(bias.values())}
    if fields.allowed_token_ids is not None:
        options["allowed_ids"] = _allowed(fields.allowed_token_ids, limits.vocab_size)
    if isinstance(fields.stop, str):
        options["stop"] = _stop(fields.stop)
    if fields.top_k == -1:
        options["top_k"] = 0
    _check_min_tokens(fields.min_tokens, max_tokens)
    return m.GenerationOptions(**options, max_tokens=max_tokens, grammar=grammar_of(fields, limits.caps))


def seed_of(seed: int | None) -> int | None:
    """Signed and unsigned 64-bit integers are both in use; the sampler's key is unsigned. Raises ApiError."""
    if seed is not None and not -(2**63) <= seed < 2**64:
        raise invalid("seed", "'seed' must be a 64-bit integer", "invalid_value")
    return None if seed is None else seed % 2**64


def _bias(logit_bias: dict[str, float], vocab_size: int | None) -> dict[int, float]:
    """Biases by id. Only the canonical form of an id is accepted, so there are no duplicates. An error names every
    invalid key."""
    if wrong := [key for key in logit_bias if not _is_id(key)]:
        raise _bad_keys(wrong, "keys of 'logit_bias' must be token ids, such as \"50256\"")
    if vocab_size is not None and (wrong := [key for key in logit_bias if int(key) >= vocab_size]):
        raise _bad_keys(
            wrong, f"out of vocabulary, the model's ids are 0..{vocab_size - 1}; vocabulary size {vocab_size}"
        )
    if wrong := [key for key, value in logit_bias.items() if not -MAX_BIAS <= value <= MAX_BIAS]:
        raise _bad_keys(wrong, "must be a number from -100 to 100")
    return {int(key): value for key, value in logit_bias.items()}


def _is_id(key: str) -> bool:
    return key.isascii() and key.isdecimal() and len(key) <= 10 and str(int(key)) == key and int(key) < 2**31


def _bad_keys(keys: list[str], problem: str) -> ApiError:
    """400 that names all of these keys of logit_bias."""
    names = ", ".join(f"'logit_bias.{_shortened(key)}'" for key in keys)
    param = f"logit_bias.{_shortened(keys[0])}" if len(keys) == 1 else "logit_bias"
    colon = "" if problem.startswith("must") else ":"
    return invalid(param, f"{names}{colon} {problem}", "invalid_value")


def _shortened(key: str) -> str:
    return key if len(key) <= MAX_KEY_CHARS else f"{key[: MAX_KEY_CHARS - 1]}…"


def _allowed(ids: list[int], vocab_size: int | None) -> bytes:
    if len(ids) > MAX_ALLOWED:  # before they are sorted
        message = f"'allowed_token_ids' has {len(ids)} entries, and at most {MAX_ALLOWED} are allowed"
        raise invalid("allowed_token_ids", message, "invalid_value")
    rising = np.unique(np.array(ids, np.int64))
    if vocab_size is not None and rising[-1] >= vocab_size:
        _check_ids(ids, "allowed_token_ids", vocab_size)
    return rising.astype("<i4").tobytes()


def _check_ids(ids: Sequence[int], param: str, vocab_size: int | None) -> None:
    for index, token_id in enumerate(ids):
        _check_id(token_id, f"{param}[{index}]", vocab_size)


def _check_id(token_id: int, param: str, vocab_size: int | None) -> None:
    if vocab_size is not None and token_id >= vocab_size:
        message = f"'{param}': token id {token_id} is out of vocabulary, the model's ids are 0..{vocab_size - 1}"
        raise invalid(param, message, "invalid_value")


def _check_min_tokens(min_tokens: int | None, max_tokens: int | None) -> None:
    if min_tokens is not None and max_tokens is not None and min_tokens > max_tokens:
        message = f"'min_tokens' must be at most {max_tokens}, the maximum number of output tokens, not {min_tokens}"
        raise invalid("min_tokens", message, "invalid_value")


def _stop(stop: str) -> list[str]:
    if not 1 <= len(stop) <= MAX_STOP_CHARS:
        raise invalid("stop", f"'stop' must be a string of 1 to {MAX_STOP_CHARS} characters", "invalid_value")
    return [stop]
