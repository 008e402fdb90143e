"""Which of a request's sequences are returned, where more are generated than were asked for. Pure."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np

from pipeline.runtime.logprob_records import logprob_dtype


class Scored(Protocol):
    """A sequence."""

    records: bytearray
    """Of each of its output ids; see pipeline/runtime/logprob_records.py"""


S = TypeVar("S", bound=Scored)


def best(sequences: Sequence[S], n: int, num_top: int = 0) -> list[S]:
    """The n with the highest log probability per output id, the best first; of equal ones those that come first. Their
    records have `num_top` of the likeliest ids."""
    return sorted(sequences, key=lambda sequence: quality(sequence, num_top), reverse=True)[:n]


def quality(sequence: Scored, num_top: int = 0) -> float:
    """The mean log probability of its output ids, those that ended it among them; -inf where it has none."""
    logprobs = np.frombuffer(bytes(sequence.records), logprob_dtype(num_top))["logprob"]
    return float(logprobs.mean(dtype=np.float64)) if len(logprobs) else -np.inf
