"""best_of: chooses the sequences to return. Pure."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np

from pipeline.runtime.token_outputs import logprob_dtype


class Scored(Protocol):
    """A sequence."""

    token_outputs: bytearray
    """Token outputs of its output ids; see pipeline/runtime/token_outputs.py"""


S = TypeVar("S", bound=Scored)


def best(sequences: Sequence[S], n: int, num_top: int = 0) -> list[S]:
    """The n sequences with the highest mean logprob, best first; ties keep their order. Their token outputs have
    `num_top` top logprobs."""
    return sorted(sequences, key=lambda sequence: mean_logprob(sequence, num_top), reverse=True)[:n]


def mean_logprob(sequence: Scored, num_top: int = 0) -> float:
    """The mean logprob of all its output ids, including stop ids; -inf if it has none."""
    logprobs = np.frombuffer(bytes(sequence.token_outputs), logprob_dtype(num_top))["logprob"]
    return float(logprobs.mean(dtype=np.float64)) if len(logprobs) else -np.inf
