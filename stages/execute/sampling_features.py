"""What a client asks of its output, as the sampler reads it. Pure: from `Sampling`, once for each row that is added.

The edge has checked all of it. Ids outside of the vocabulary, which only the model's folder tells, mean nothing here.
"""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from pipeline.kernels.logits_processors import NO_IDS, LogitsProcessors, bits_of, pack_runs
from pipeline.kernels.step_inputs import IntArray
from pipeline.runtime.messages import NOTHING_LEFT, Sampling


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
    """The number of float32's range that is nearest."""
    return min(max(value, -LARGEST), LARGEST)


def logits_processors_of(
    sampling: Sampling, ids: IntArray, num_prompt: int, eos_ids: Collection[int], vocab_size: int
) -> LogitsProcessors | None:
    """How the logits of a row change, None where they don't; `ids` is where the row's are."""
    runs, num_runs = pack_runs(sampling.bad_words, vocab_size) if sampling.bad_words else (NO_IDS, 0)
    bias = {
        token: value
        for token, value in zip(sampling.bias_ids, sampling.bias_values, strict=True)
        if 0 <= token < vocab_size
    }
    penalties = sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty
    if not (bias or num_runs or sampling.allowed_ids or sampling.min_tokens > 0) and penalties == (1, 0, 0):
        return None
    allowed = None
    if sampling.allowed_ids:
        allowed = bits_of(_inside(np.frombuffer(sampling.allowed_ids, "<i4"), vocab_size), vocab_size)
    # An end-of-sequence id is none before its time, though it may not be what ends this output.
    enders = list({*eos_ids, *sampling.stop_token_ids}) if sampling.min_tokens > 0 else []
    return LogitsProcessors(
        ids=ids,
        num_prompt=num_prompt,
        repetition=single(sampling.repetition_penalty),
        presence=single(sampling.presence_penalty),
        frequency=single(sampling.frequency_penalty),
        bias_ids=np.array(list(bias), np.int32),
        bias_values=np.array([single(value) for value in bias.values()], np.float32),
        allowed=allowed,
        runs=runs,
        num_runs=num_runs,
        enders=_inside(np.array(enders, np.int64), vocab_size),
        min_tokens=min(max(0, sampling.min_tokens), LONGEST),
    )


def no_token_error(processors: LogitsProcessors | None, num_output: int, has_grammar: bool) -> str:
    """Why no id could be drawn for a row, in words for its client."""
    names = ["what the output is to match"] if has_grammar else []
    if processors is not None:
        names += ["'allowed_token_ids'"] if processors.allowed is not None else []
        names += ["'bad_words'"] if processors.num_runs else []
        names += ["'min_tokens'"] if num_output < processors.min_tokens else []
    if not names:
        return "the model's logits are no numbers"
    return f"{NOTHING_LEFT}{' and '.join(names)} leave{'s' * (len(names) == 1)} none behind {num_output} tokens"


def _inside(ids: "np.ndarray[Any, Any] | Sequence[int]", vocab_size: int) -> IntArray:
    array = np.asarray(ids)
    kept: IntArray = array[(array >= 0) & (array < vocab_size)].astype(np.int32)
    return kept
