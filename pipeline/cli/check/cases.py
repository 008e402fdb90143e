"""What a check of a model compares. Our side makes `Ours`, transformers' side `Theirs`; ids name what goes together."""

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

Ids = tuple[int, ...]
Logits = np.ndarray[Any, np.dtype[np.float32]]

NUM_GREEDY = 16
"""Ids of each greedy text."""
PREFIX = 48
"""Ids that rows behind a cached prefix have in common: three blocks."""


class CheckPlan(msgspec.Struct, frozen=True):
    """What both sides compute."""

    prompts: list[list[int]]
    """Of very different lengths. The longest comes first, and the next shares its first `PREFIX` ids."""


@dataclass(frozen=True, slots=True)
class ComputedCase:
    """The logits that one way of computing them has behind some ids."""

    way: str
    ids: Ids
    logits: Logits
    """[vocab_size]"""


@dataclass(slots=True)
class Ours:
    """What one of our programs made."""

    program: str
    """As people know it."""
    exact: bool
    """Whether it computes in float32 all through; else with matrices, keys and values in bfloat16."""
    made: list[ComputedCase] = field(default_factory=list)
    texts: dict[str, list[list[int]]] = field(default_factory=dict)
    """The greedy ids behind each prompt, by the way in which they were computed."""


@dataclass(slots=True)
class Theirs:
    """What transformers makes of the same weights."""

    logits: dict[Ids, Logits]
    """Behind each ids that we have logits for."""
    texts: list[list[int]]
    """The greedy ids behind each prompt of the plan."""
