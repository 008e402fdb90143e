"""Sequences without a row, by order: those that wait to be computed, and those that wait in swap space."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from pipeline.stages.schedule.request import Order, Sequence


class Queue:
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

    def add(self, sequence: Sequence) -> None:
        insort(self._entries, (sequence.order, sequence))

    def remove(self, sequence: Sequence) -> None:
        place = bisect_left(self._entries, (sequence.order, sequence))
        assert self._entries[place][1] is sequence, f"sequence {sequence.seq} is not in this queue"
        del self._entries[place]
