"""Which of a request's sequences are returned, where more are generated than were asked for. Pure."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np


class Scored(Protocol):
    """A sequence."""

    logprobs: bytearray
    """float32, of each of its output ids"""


S = TypeVar("S", bound=Scored)


def best(sequences: Sequence[S], n: int) -> list[S]:
    """The n with the highest log probability per output id, the best first; of equal ones those that come first."""
    return sorted(sequences, key=quality, reverse=True)[:n]


def quality(sequence: Scored) -> float:
    """The mean log probability of its output ids, those that ended it among them; -inf where it has none."""
    logprobs = np.frombuffer(sequence.logprobs, "<f4")
    return float(logprobs.mean(dtype=np.float64)) if len(logprobs) else -np.inf
