"""Queues of sequences without a row, in order: those to be computed, and those in swap space."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import merge
from itertools import islice

from pipeline.stages.schedule.policies.policy import MAX_SKIPPED, Policy
from pipeline.stages.schedule.request import Order, Sequence

MAX_CANDIDATES = 64
"""How many texts at the head of the queue are checked for one that fits into a step whole."""
MAX_LONG_CANDIDATES = 8
"""How many long prompts at the head of the queue are checked for a cached prefix."""


class SequenceQueue:
    """Keeps sequences sorted by `order`. A sequence is in one queue at most."""

    def __init__(self) -> None:
        self._entries: list[tuple[Order, Sequence]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        """In order. Do not change the queue while iterating."""
        return (sequence for _, sequence in self._entries)

    def __contains__(self, sequence: object) -> bool:
        return any(other is sequence for _, other in self._entries)

    @property
    def first(self) -> Sequence:
        return self._entries[0][1]

    @property
    def first_order(self) -> Order:
        """The order of the first one in a queue that isn't empty."""
        return self._entries[0][0]

    @property
    def first_rank(self) -> int:
        """The lowest rank in a queue that isn't empty."""
        return self._entries[0][0][0]

    def add(self, sequence: Sequence) -> None:
        insort(self._entries, (sequence.order, sequence))

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self._entries, (sequence.order, sequence))
        assert self._entries[index][1] is sequence, f"sequence {sequence.seq} is not in this queue"
        del self._entries[index]


class WaitingQueue:
    """Sequences to be computed. Long prompts have a queue of their own, so that short ones after them are found at
    once, and so have paced ones, which wait for places of their own."""

    def __init__(self, policy: Policy, long_prompt_tokens: int) -> None:
        self._policy = policy
        self._long_prompt_tokens = long_prompt_tokens
        self._short = SequenceQueue()
        self._long = SequenceQueue()
        self.paced = SequenceQueue()
        """Those with slow masks (policies/mask_turns.py). `choose` returns none of them."""
        self._skipped: list[Sequence] = []
        self._num = 0
        """In all three: several steps of each turn ask for it."""

    def __len__(self) -> int:
        return self._num

    def __contains__(self, sequence: object) -> bool:
        return any(sequence in queue for queue in (self._short, self._long, self.paced))

    @property
    def num_unpaced(self) -> int:
        return self._num - len(self.paced)

    @property
    def sequences(self) -> list[Sequence]:
        return [*self._short, *self._long, *self.paced]

    @property
    def first_rank(self) -> int:
        """The lowest rank in a queue that isn't empty."""
        return self.first_order[0]

    @property
    def first_order(self) -> Order:
        """The order of the first sequence in a queue that isn't empty."""
        return min([queue.first_order for queue in (self._short, self._long, self.paced) if queue])

    def add(self, sequence: Sequence) -> None:
        sequence.is_long = len(sequence.ids) > self._long_prompt_tokens
        self._queue_of(sequence).add(sequence)
        self._num += 1

    def remove(self, sequence: Sequence) -> None:
        self._queue_of(sequence).remove(sequence)
        self._num -= 1

    def pace(self, sequence: Sequence) -> None:
        """A waiting sequence is paced from now on."""
        self.remove(sequence)
        sequence.is_paced, sequence.num_quick_masks = True, 0
        self.add(sequence)

    def choose(
        self, has_room_for_long: Callable[[int], bool], num_cached_blocks: Callable[[Sequence], int], block_size: int
    ) -> Sequence | None:
        """Return the sequence that the policy starts next. Prompts with more than `long_prompt_tokens` to compute are
        skipped if the step has no room for long prompts of their rank, but at most MAX_SKIPPED times.
        `num_cached_blocks` returns how many blocks of a sequence's ids are in the prefix cache."""
        candidates = list(islice(self._short, self._policy.window))
        eligible = candidates
        if len(self._long):
            longs = list(islice(self._long, max(self._policy.window, MAX_LONG_CANDIDATES)))
            candidates = sorted(candidates + longs, key=_by_order)
            eligible = [
                sequence
                for sequence in candidates
                if not sequence.is_long
                or has_room_for_long(sequence.order[0])
                or sequence.num_skipped >= MAX_SKIPPED
                or len(sequence.ids) - num_cached_blocks(sequence) * block_size <= self._long_prompt_tokens
            ][: self._policy.window]
        if not eligible:
            return None
        chosen = eligible[0] if len(eligible) == 1 else eligible[self._policy.choose(eligible, num_cached_blocks)]
        self._skipped = [sequence for sequence in candidates if sequence.order < chosen.order]
        return chosen

    def choose_whole(self, fits: Callable[[int], bool], *, prefers_short: bool) -> Sequence | None:
        """Return the sequence that is computed whole next: the first that `fits` into the step by its number of tokens.
        A step begins with the first of all, which always fits; with `prefers_short`, with the first that is not long,
        if no long one has a lower rank."""
        self._skipped = []
        if prefers_short and self._short and not (self._long and self._long.first_rank < self._short.first_rank):
            waiting = iter(self._short)
        else:
            waiting = merge(self._short, self._long, key=_by_order) if self._long else iter(self._short)
        return next((one for one in islice(waiting, MAX_CANDIDATES) if fits(len(one.ids))), None)

    def short_after(self, first: Sequence, rank: int) -> Iterator[Sequence]:
        """The short prompts after `first` in order whose rank is below `rank`."""
        for sequence in self._short:
            if sequence.order[0] >= rank:
                return
            if sequence.order > first.order:
                yield sequence

    def count_skipped(self) -> None:
        """The sequence chosen last has started: count it for those that it was preferred to."""
        for sequence in self._skipped:
            sequence.num_skipped += 1

    def clear_skipped(self) -> None:
        """A sequence from elsewhere starts next, so none is skipped here."""
        self._skipped = []

    def _queue_of(self, sequence: Sequence) -> SequenceQueue:
        return self.paced if sequence.is_paced else self._long if sequence.is_long else self._short


def _by_order(sequence: Sequence) -> Order:
    return sequence.order
