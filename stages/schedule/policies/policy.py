"""Scheduling policies: the order in which sequences are served, and whether they preempt each other. Pure.

A policy gives each sequence a rank, and lower ranks go first: to compute, to start and to resume. If the policy
preempts, a waiting sequence also takes the place of a running one of a higher rank. Within a rank, the sequence that
came first goes first and is preempted last, so it always finishes.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Protocol

from pipeline.config.settings import PolicyName
from pipeline.stages.schedule.request import RequestState, Sequence

WINDOW = 32
"""How many waiting sequences are searched for the longest cached prefix."""
MAX_SKIPPED = 64
"""How often a waiting sequence may be skipped before it goes first."""


class Policy(Protocol):
    """The decisions that a policy makes."""

    preempts: bool
    """Whether a waiting sequence may take the place of a running one of a higher rank."""

    def rank(self, request: RequestState) -> int:
        """Lower goes first."""
        ...

    def choose(self, waiting: Items[Sequence], num_cached_blocks: Callable[[Sequence], int]) -> int:
        """The index in `waiting`, which is in order and not empty, of the sequence that starts next.
        `num_cached_blocks` returns how many blocks of a sequence's ids are in the prefix cache."""
        ...

    window: int
    """How many waiting sequences `choose` gets at most."""


class Fcfs:
    """First come, first served."""

    preempts = False
    window = 1

    def rank(self, request: RequestState) -> int:
        return 0

    def choose(self, waiting: Items[Sequence], num_cached_blocks: Callable[[Sequence], int]) -> int:
        return 0


class Priority(Fcfs):
    """The lowest `priority` value first. Preempts running requests with a larger value."""

    preempts = True

    def rank(self, request: RequestState) -> int:
        return request.priority


class LongestPrefixMatch(Fcfs):
    """The sequence with the longest cached prefix starts first, so that a prefix is used while it is cached. Proposed
    by SGLang (Zheng et al., 2024, arXiv:2312.07104); unlike there, a sequence is skipped MAX_SKIPPED times at most."""

    window = WINDOW

    def choose(self, waiting: Items[Sequence], num_cached_blocks: Callable[[Sequence], int]) -> int:
        if waiting[0].num_skipped >= MAX_SKIPPED:
            return 0
        lengths = [num_cached_blocks(sequence) for sequence in waiting]
        return lengths.index(max(lengths))


POLICIES: dict[PolicyName, Callable[[], Policy]] = {
    "fcfs": Fcfs,
    "priority": Priority,
    "longest-prefix-match": LongestPrefixMatch,
}


def may_start(num_available: int, num_needed: int, num_running: int) -> bool:
    """Whether a sequence that needs `num_needed` blocks may start beside `num_running` others.

    Every running row may soon need its next block. A new sequence that took those blocks would be preempted a few steps
    later and lose what it had computed, so one block is left for each running row.
    """
    return num_available - num_needed >= num_running
