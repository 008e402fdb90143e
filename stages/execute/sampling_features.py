"""Converts a request's `GenerationOptions` to what the sampler reads, once for each row that is added. Pure.

The gateway has validated the request. Token ids outside the vocabulary are ignored.
"""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from pipeline.kernels.sampling.logits_processor_inputs import NO_IDS, LogitsProcessors, bits_of, pack_runs
from pipeline.kernels.step_inputs import IntArray
from pipeline.runtime.messages import NAN_LOGITS, NOTHING_LEFT, GenerationOptions


class SamplingFeature:
    """What a row needs besides the greedy next id, as bits."""

    RANDOM = 1
    LOGITS_PROCESSORS = 2
    GRAMMAR_MASK = 4
    LOGPROBS = 8
    PROMPT_LOGPROBS = 16
    EMBEDDING = 32


NOT_GREEDY = (
    SamplingFeature.RANDOM | SamplingFeature.LOGITS_PROCESSORS | SamplingFeature.GRAMMAR_MASK | SamplingFeature.LOGPROBS
)

LARGEST = float(np.finfo(np.float32).max)
LONGEST = int(np.iinfo(np.int32).max)


def single(value: float) -> float:
    """Clamp to the range of float32."""
    return min(max(value, -LARGEST), LARGEST)


def logits_processors_of(
    options: GenerationOptions, ids: IntArray, num_prompt: int, eos_ids: Collection[int], vocab_size: int
) -> LogitsProcessors | None:
    """The logits processors of a row, or None if it has none. `ids` is the row's array of token ids."""
    runs, num_runs = pack_runs(options.bad_words_ids, vocab_size) if options.bad_words_ids else (NO_IDS, 0)
    bias = {
        token: value
        for token, value in zip(options.bias_ids, options.bias_values, strict=True)
        if 0 <= token < vocab_size
    }
    penalties = options.repetition_penalty, options.presence_penalty, options.frequency_penalty
    if not (bias or num_runs or options.allowed_ids or options.min_tokens > 0) and penalties == (1, 0, 0):
        return None
    allowed = None
    if options.allowed_ids:
        allowed = bits_of(_inside(np.frombuffer(options.allowed_ids, "<i4"), vocab_size), vocab_size)
    # min_tokens excludes end-of-sequence ids too, even if they do not stop this output.
    enders = list({*eos_ids, *options.stop_token_ids}) if options.min_tokens > 0 else []
    return LogitsProcessors(
        ids=ids,
        num_prompt=num_prompt,
        repetition=single(options.repetition_penalty),
        presence=single(options.presence_penalty),
        frequency=single(options.frequency_penalty),
        bias_ids=np.array(list(bias), np.int32),
        bias_values=np.array([single(value) for value in bias.values()], np.float32),
        allowed=allowed,
        runs=runs,
        num_runs=num_runs,
        enders=_inside(np.array(enders, np.int64), vocab_size),
        min_tokens=min(max(0, options.min_tokens), LONGEST),
    )


def no_token_error(
    processors: LogitsProcessors | None, num_output: int, has_grammar: bool, is_nan: bool = False
) -> str:
    """The error for a row for which no token can be sampled. `is_nan`: its logits are known to be NaN. A grammar that
    allows none by itself has failed before (`grammar_masks`), so that without processors they must be."""
    if is_nan or processors is None:
        return NAN_LOGITS
    names = ["the structured output format"] if has_grammar else []
    names += ["'allowed_token_ids'"] if processors.allowed is not None else []
    # The executor does not know whose they are.
    names += ["'bad_words' or the model's generation_config.json"] if processors.num_runs else []
    names += ["'min_tokens'"] if num_output < processors.min_tokens else []
    if not names or names == ["the structured output format"]:
        return NAN_LOGITS
    verb = "excludes" if len(names) == 1 else "exclude"
    return f"{NOTHING_LEFT} after {num_output} output tokens: {' and '.join(names)} {verb} all of them"


def _inside(ids: "np.ndarray[Any, Any] | Sequence[int]", vocab_size: int) -> IntArray:
    array = np.asarray(ids)
    kept: IntArray = array[(array >= 0) & (array < vocab_size)].astype(np.int32)
    return kept
