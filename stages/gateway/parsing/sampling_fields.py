"""Sampling and stop fields of all routes that generate, and their checks. Pure.

Checks that are not in the types depend on the server: the settings in `COUNTED` bound lists, and ids must be in the
vocabulary. Lists are counted before their entries are processed.
"""

from typing import Annotated, Literal

import numpy as np
from msgspec import Meta

from pipeline.config.settings import LimitSettings as Caps
from pipeline.runtime import messages as m
from pipeline.stages.gateway.errors import ApiError, invalid
from pipeline.stages.gateway.parsing.parsed_request import RequestLimits
from pipeline.stages.gateway.parsing.structured_outputs import StructuredFields, grammar_of

MAX_STOP_CHARS = 256
"""Longest stop string, and longest entry of bad_words."""
MAX_BIAS = 100.0
MAX_KEY_CHARS = 32
"""Characters that an error shows of an invalid key of logit_bias: there may be many."""
MAX_ALLOWED = 2**20
"""Entries of allowed_token_ids over all sequences of a request: a few vocabularies."""
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100.0
"""vLLM allows all values above 0, but logits scaled by values outside this range overflow."""

MAX_LENGTH_PENALTY = 10.0
"""A length to a higher power is too large for a score to have any digits left."""

MAX_LOGPROB_TOKEN_IDS = 128
"""As in vLLM."""

Id = Annotated[int, Meta(ge=0, lt=2**31)]
ShortText = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]

COUNTED = {
    "stop": "max_stop_strings",
    "stop_token_ids": "max_stop_token_ids",
    "logit_bias": "max_logit_bias",
    "bad_words": "max_bad_words",
}
"""List fields, and the setting in `limits` that bounds each."""


class SamplingFields(StructuredFields, kw_only=True):
    """Fields of every route that generates."""

    n: Annotated[int, Meta(ge=1, description="Number of choices for each prompt; default 1.")] | None = None
    temperature: (
        Annotated[float, Meta(ge=0, le=2, description="0 is greedy. By default the model's, else 1.")] | None
    ) = None
    top_p: Annotated[float, Meta(gt=0, le=1, description="By default the model's, else 1.")] | None = None
    top_k: (
        Annotated[int, Meta(ge=-1, lt=2**31, description="-1 and 0 are off. By default the model's, else off.")] | None
    ) = None
    min_p: Annotated[float, Meta(ge=0, le=1, description="By default the model's, else 0.")] | None = None
    seed: Annotated[int, Meta(description="-2^63 to 2^64 - 1; the same seed gives the same text.")] | None = None
    repetition_penalty: (
        Annotated[
            float,
            Meta(
                ge=MIN_REPETITION_PENALTY,
                le=MAX_REPETITION_PENALTY,
                description="Above 1 makes tokens of the prompt and the output less likely. By default the model's, "
                "else 1.",
            ),
        ]
        | None
    ) = None
    presence_penalty: (
        Annotated[Penalty, Meta(description="Above 0 makes tokens of the output less likely; default 0.")] | None
    ) = None
    frequency_penalty: (
        Annotated[
            Penalty, Meta(description="Like presence_penalty, multiplied by the number of occurrences; default 0.")
        ]
        | None
    ) = None
    logit_bias: (
        Annotated[dict[str, float], Meta(description="Token ids and the values to add to their logits, -100 to 100.")]
        | None
    ) = None
    allowed_token_ids: Annotated[list[Id], Meta(min_length=1, description="Only these ids are sampled.")] | None = None
    bad_words: Annotated[list[ShortText], Meta(description="Texts that the output must not contain.")] | None = None
    min_tokens: (
        Annotated[
            int, Meta(ge=0, lt=2**31, description="Nothing ends a choice before it has this many tokens; default 0.")
        ]
        | None
    ) = None
    stop: (
        Annotated[str | list[ShortText], Meta(description="The text ends before the first of these strings.")] | None
    ) = None
    stop_token_ids: Annotated[list[Id], Meta(description="Token ids that end a choice.")] | None = None
    ignore_eos: Annotated[bool, Meta(description="true: continue after the model's end of sequence.")] | None = None
    skip_special_tokens: (
        Annotated[bool, Meta(description="false: the text has special tokens; default true.")] | None
    ) = None
    spaces_between_special_tokens: Annotated[bool, Meta(description="Changes nothing.")] | None = None
    """vLLM's: no supported tokenizer puts spaces between special tokens."""
    include_stop_str_in_output: (
        Annotated[bool, Meta(description="true: the text ends after the stop string.")] | None
    ) = None
    logprob_token_ids: (
        Annotated[
            list[Id],
            Meta(
                max_length=MAX_LOGPROB_TOKEN_IDS,
                description="With logprobs: return log probabilities of these ids instead of the likeliest ones.",
            ),
        ]
        | None
    ) = None
    prompt_logprobs: (
        Annotated[
            int, Meta(ge=0, description="Return log probabilities of the prompt's tokens, with this many top logprobs.")
        ]
        | None
    ) = None
    use_beam_search: (
        Annotated[bool, Meta(description="true: the choices are the best n that a beam search of width n finds.")]
        | None
    ) = None
    length_penalty: (
        Annotated[
            float,
            Meta(
                ge=-MAX_LENGTH_PENALTY,
                le=MAX_LENGTH_PENALTY,
                description="With use_beam_search: the score of a choice is the sum of its log probabilities, divided "
                "by length ** length_penalty; default 1.",
            ),
        ]
        | None
    ) = None
    early_stopping: (
        Annotated[
            bool | Literal["never"],
            Meta(
                description="With use_beam_search: true ends the search when it has found n choices, never when no "
                "beam can get a better score; default false, when no beam has one."
            ),
        ]
        | None
    ) = None


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


def generation_options(fields: SamplingFields, max_tokens: int | None, limits: RequestLimits) -> m.GenerationOptions:
    """The options that all routes share. Call `check_counts` first. Raises ApiError."""
    bias = _bias(fields.logit_bias or {}, limits.vocab_size)
    defaults = limits.defaults
    stop_ids = fields.stop_token_ids or []
    _check_ids(stop_ids, "stop_token_ids", limits.vocab_size)
    _check_ids(fields.logprob_token_ids or [], "logprob_token_ids", limits.vocab_size)
    return m.GenerationOptions(
        n=fields.n or 1,
        max_tokens=max_tokens,
        temperature=defaults.temperature if fields.temperature is None else fields.temperature,
        top_p=defaults.top_p if fields.top_p is None else fields.top_p,
        top_k=defaults.top_k if fields.top_k is None else max(0, fields.top_k),
        min_p=defaults.min_p if fields.min_p is None else fields.min_p,
        repetition_penalty=(
            defaults.repetition_penalty if fields.repetition_penalty is None else fields.repetition_penalty
        ),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        bias_ids=list(bias),
        bias_values=list(bias.values()),
        allowed_ids=_allowed(fields.allowed_token_ids, limits.vocab_size),
        bad_words=fields.bad_words or [],
        min_tokens=_min_tokens(fields.min_tokens or 0, max_tokens),
        stop=_stop(fields.stop),
        stop_token_ids=stop_ids,
        ignore_eos=bool(fields.ignore_eos),
        include_stop=bool(fields.include_stop_str_in_output),
        skip_special_tokens=fields.skip_special_tokens is not False,
        grammar=grammar_of(fields, limits.caps),
        logprob_token_ids=fields.logprob_token_ids or [],
    )


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


def _allowed(ids: list[int] | None, vocab_size: int | None) -> bytes:
    if ids is None:
        return b""
    if len(ids) > MAX_ALLOWED:  # before they are sorted
        message = f"'allowed_token_ids' has {len(ids)} entries, and at most {MAX_ALLOWED} are allowed"
        raise invalid("allowed_token_ids", message, "invalid_value")
    rising = np.unique(np.array(ids, np.int64))
    if vocab_size is not None and rising[-1] >= vocab_size:
        _check_ids(ids, "allowed_token_ids", vocab_size)
    return rising.astype("<i4").tobytes()


def _check_ids(ids: list[int], param: str, vocab_size: int | None) -> None:
    for place, token_id in enumerate(ids):
        _check_id(token_id, f"{param}[{place}]", vocab_size)


def _check_id(token_id: int, param: str, vocab_size: int | None) -> None:
    if vocab_size is not None and token_id >= vocab_size:
        message = f"'{param}': token id {token_id} is out of vocabulary, the model's ids are 0..{vocab_size - 1}"
        raise invalid(param, message, "invalid_value")


def _min_tokens(min_tokens: int, max_tokens: int | None) -> int:
    if max_tokens is not None and min_tokens > max_tokens:
        message = f"'min_tokens' must be at most {max_tokens}, the maximum number of output tokens, not {min_tokens}"
        raise invalid("min_tokens", message, "invalid_value")
    return min_tokens


def _stop(stop: str | list[str] | None) -> list[str]:
    if isinstance(stop, str):
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise invalid("stop", f"'stop' must be a string of 1 to {MAX_STOP_CHARS} characters", "invalid_value")
        return [stop]
    return stop or []
