"""The data that a check of a model compares. Our programs produce `ProgramResults`, transformers `ReferenceResults`.
Equal ids belong together."""

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

Ids = tuple[int, ...]
Logits = np.ndarray[Any, np.dtype[np.float32]]

NUM_GREEDY = 16
"""Ids of each greedy output."""
PREFIX = 48
"""Ids shared by rows with a cached prefix: three blocks."""


class CheckPlan(msgspec.Struct, frozen=True):
    """The prompts that both sides compute."""

    prompts: list[list[int]]
    """Prompts of very different lengths. The first is the longest; the second shares its first `PREFIX` ids."""


@dataclass(frozen=True, slots=True)
class ComputedCase:
    """Logits after a sequence of ids, from one way to compute them."""

    way: str
    ids: Ids
    logits: Logits
    """[vocab_size]"""


@dataclass(slots=True)
class ProgramResults:
    """Results of one of our programs."""

    program: str
    """Name for the report."""
    exact: bool
    """Whether it computes entirely in float32. If not, matrices, keys and values are bfloat16."""
    made: list[ComputedCase] = field(default_factory=list)
    texts: dict[str, list[list[int]]] = field(default_factory=dict)
    """Greedy output of each prompt, by the way it was computed."""
    chooses_experts: bool = False
    """Whether the model has a mixture of experts, so that rounding errors may change who computes a token."""


@dataclass(slots=True)
class ReferenceResults:
    """Results of transformers with the same weights."""

    logits: dict[Ids, Logits]
    """Logits after each sequence of ids that our side has logits for."""
    texts: list[list[int]]
    """Greedy output of each prompt of the plan."""
    bfloat16: dict[Ids, Logits] = field(default_factory=dict)
    """The same logits from transformers in bfloat16; empty for an exact program, which needs no such measure."""
