"""Sequences without a row, by order: those that wait to be computed, and those that wait in swap space."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from itertools import islice

from pipeline.stages.schedule.policies.policy import MAX_SKIPPED, Policy
from pipeline.stages.schedule.request import Order, Sequence

MAX_LONG_LOOKED_AT = 8
"""Long ids at the queue's beginning that are looked at for a prompt of which most is cached."""


class SequenceQueue:
    """Owns their order. A sequence is in one queue at most."""

    def __init__(self) -> None:
        self._entries: list[tuple[Order, Sequence]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        """The first in order comes first. The queue must not change meanwhile."""
        return (sequence for _, sequence in self._entries)

    def __contains__(self, sequence: object) -> bool:
        return any(other is sequence for _, other in self._entries)

    @property
    def first(self) -> Sequence:
        return self._entries[0][1]

    @property
    def first_rank(self) -> int:
        """Of a queue that isn't empty."""
        return self._entries[0][0][0]

    def add(self, sequence: Sequence) -> None:
        insort(self._entries, (sequence.order, sequence))

    def remove(self, sequence: Sequence) -> None:
        place = bisect_left(self._entries, (sequence.order, sequence))
        assert self._entries[place][1] is sequence, f"sequence {sequence.seq} is not in this queue"
        del self._entries[place]


class WaitingQueue:
    """Those that wait to be computed. Long ones are kept apart, so that short ones behind them are found at once."""

    def __init__(self, policy: Policy, long_prompt_tokens: int) -> None:
        self._policy = policy
        self._long_tokens = long_prompt_tokens
        self._short = SequenceQueue()
        self._long = SequenceQueue()
        self._passed: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._short) + len(self._long)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._short or sequence in self._long

    @property
    def first_rank(self) -> int:
        """The lowest of those that wait; somebody does."""
        return min(queue.first_rank for queue in (self._short, self._long) if queue)

    def add(self, sequence: Sequence) -> None:
        sequence.is_long = len(sequence.ids) > self._long_tokens
        self._queue_of(sequence).add(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._queue_of(sequence).remove(sequence)

    def choose(
        self, has_room_for_long: Callable[[int], bool], num_cached: Callable[[Sequence], int], block_size: int
    ) -> Sequence | None:
        """Whom the policy starts next. Where a step has no room for long prompts of a rank, those are passed over that
        have more than `long_prompt_tokens` to compute, until they have been so too often. `num_cached` says how many
        blocks of a sequence's ids are in the prefix cache."""
        looked_at = list(islice(self._short, self._policy.window))
        able = looked_at
        if len(self._long):
            longs = list(islice(self._long, max(self._policy.window, MAX_LONG_LOOKED_AT)))
            looked_at = sorted(looked_at + longs, key=_by_order)
            able = [
                sequence
                for sequence in looked_at
                if not sequence.is_long
                or has_room_for_long(sequence.order[0])
                or sequence.num_skipped >= MAX_SKIPPED
                or len(sequence.ids) - num_cached(sequence) * block_size <= self._long_tokens
            ][: self._policy.window]
        if not able:
            return None
        chosen = able[0] if len(able) == 1 else able[self._policy.choose(able, num_cached)]
        self._passed = [sequence for sequence in looked_at if sequence.order < chosen.order]
        return chosen

    def behind(self, first: Sequence, rank: int) -> Iterator[Sequence]:
        """Those that are not long, come after `first` in order and have a rank below `rank`."""
        for sequence in self._short:
            if sequence.order[0] >= rank:
                return
            if sequence.order > first.order:
                yield sequence

    def started(self) -> None:
        """Who was chosen last has started before those that it was preferred to."""
        for sequence in self._passed:
            sequence.num_skipped += 1

    def choose_none(self) -> None:
        """Somebody who does not wait here starts next."""
        self._passed = []

    def _queue_of(self, sequence: Sequence) -> SequenceQueue:
        return self._long if sequence.is_long else self._short


def _by_order(sequence: Sequence) -> Order:
    return sequence.order
