"""Who goes first, and who may be put back for whom. Pure functions over what is known of sequences.

A policy gives each sequence a rank. Ranks are compared first: a sequence of a lower rank is computed, started and
brought back before all of a higher one, and, where the policy preempts, instead of them. Within a rank, who came first
goes first and is preempted last, and so always ends.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Literal, Protocol

from pipeline.stages.schedule.request import PromptRequest, Sequence

PolicyName = Literal["fcfs", "priority", "longest-prefix-match"]

WINDOW = 32
"""Waiting sequences, from the first on, among which the longest prefix is looked for."""
MAX_SKIPPED = 64
"""How often one of them may be passed over before it goes first."""


class Policy(Protocol):
    """What the scheduler asks."""

    preempts: bool
    """Whether a waiting sequence may take the place of a running one of a higher rank."""

    def rank(self, request: PromptRequest) -> int:
        """Lower goes first."""
        ...

    def choose(self, waiting: Items[Sequence], num_cached: Callable[[Sequence], int]) -> int:
        """The place of the one that starts next among those that wait, by order; there is one at least. `num_cached`
        says how many blocks of a sequence's ids are in the prefix cache."""
        ...

    window: int
    """How many of the waiting `choose` looks at."""


class Fcfs:
    """First come, first served."""

    preempts = False
    window = 1

    def rank(self, request: PromptRequest) -> int:
        return 0

    def choose(self, waiting: Items[Sequence], num_cached: Callable[[Sequence], int]) -> int:
        return 0


class Priority(Fcfs):
    """The lowest priority first, and instead of higher ones that run."""

    preempts = True

    def rank(self, request: PromptRequest) -> int:
        return request.priority


class LongestPrefixMatch(Fcfs):
    """Who finds most of its ids in the cache starts first, so that a prefix is used while it is there. Proposed by
    SGLang (Zheng et al., 2024, arXiv:2312.07104); here nobody is passed over for ever."""

    window = WINDOW

    def choose(self, waiting: Items[Sequence], num_cached: Callable[[Sequence], int]) -> int:
        if waiting[0].num_skipped >= MAX_SKIPPED:
            return 0
        lengths = [num_cached(sequence) for sequence in waiting]
        return lengths.index(max(lengths))


POLICIES: dict[PolicyName, Callable[[], Policy]] = {
    "fcfs": Fcfs,
    "priority": Priority,
    "longest-prefix-match": LongestPrefixMatch,
}


def may_start(num_available: int, num_needed: int, num_running: int) -> bool:
    """Whether a sequence that needs `num_needed` more blocks may start beside `num_running` others.

    Every running row may cross a block boundary soon. A newcomer that takes their next blocks would be preempted for
    them a few steps later, and all that it had computed would be lost; so one block is left for each.
    """
    return num_available - num_needed >= num_running
