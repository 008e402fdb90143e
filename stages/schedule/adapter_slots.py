"""Bounds how many LoRA adapters run at once.

An adapter has a slot while one of its sequences waits for its turn, runs, or is swapped out. Those that the quarantine
holds back have none, so that suspects find one. Sequences of adapters without a slot are parked here, so they delay no
others; the adapter that has waited longest gets the next free slot.

    a sequence is added ──slot──► the scheduler's queues ──finished──► the slot is free when none is left
            │                            ▲
            └──no slot──► parked ────────┘

New sequences of an adapter that has a slot join it, but only MAX_OVERTAKEN times while another adapter waits: then they
park behind it. So no adapter waits forever.
"""

from collections.abc import Iterator

from pipeline.metrics.stats import AdapterCounts
from pipeline.stages.schedule.queues import SequenceQueue
from pipeline.stages.schedule.request import Sequence

MAX_OVERTAKEN = 32
"""Sequences that may join adapters with a slot while one without waits."""


class AdapterSlots:
    """Owns the slots and the parked sequences."""

    def __init__(self, max_loras: int) -> None:
        self._max_loras = max_loras
        self._using: dict[str, set[int]] = {}
        """By adapter with a slot: its sequences in the scheduler's queues and rows, by `Sequence.seq`."""
        self._parked: dict[str, SequenceQueue] = {}
        """By adapter, the one that has waited longest first."""
        self._num_overtaken: dict[str, int] = {}

    def __len__(self) -> int:
        """Parked sequences."""
        return sum(len(queue) for queue in self._parked.values())

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for queue in self._parked.values() for sequence in queue)

    def __contains__(self, sequence: object) -> bool:
        return any(other is sequence for other in self)

    @property
    def running(self) -> list[str]:
        """Adapters with a slot."""
        return list(self._using)

    @property
    def waiting(self) -> list[str]:
        """Adapters without one, whose sequences wait."""
        return list(self._parked)

    def admit(self, sequence: Sequence) -> bool:
        """Whether a sequence may go on: it has no adapter, or one with a slot. Otherwise it is parked."""
        adapter = sequence.request.adapter_id
        if not adapter:
            return True
        if (using := self._using.get(adapter)) is not None:
            request = sequence.request
            if sequence.seq in using or any(other.seq in using for other in request.open_sequences.values()):
                using.add(sequence.seq)
                return True
            if adapter not in self._parked and all(n < MAX_OVERTAKEN for n in self._num_overtaken.values()):
                using.add(sequence.seq)
                for waiting in self._num_overtaken:
                    self._num_overtaken[waiting] += 1
                return True
        elif len(self._using) < self._max_loras and not self._parked:
            self._using[adapter] = {sequence.seq}
            return True
        self._parked.setdefault(adapter, SequenceQueue()).add(sequence)
        self._num_overtaken.setdefault(adapter, 0)
        return False

    def is_parked(self, sequence: Sequence) -> bool:
        adapter = sequence.request.adapter_id
        return adapter in self._parked and sequence in self._parked[adapter]

    def remove(self, sequence: Sequence) -> None:
        """A parked sequence has ended."""
        adapter = sequence.request.adapter_id
        self._parked[adapter].remove(sequence)
        if not self._parked[adapter]:
            del self._parked[adapter], self._num_overtaken[adapter]

    def release(self, sequence: Sequence) -> list[Sequence]:
        """A sequence has ended, or is held back. Returns those that a slot is free for now, no longer parked."""
        adapter = sequence.request.adapter_id
        if (using := self._using.get(adapter)) is None:
            return []
        using.discard(sequence.seq)
        if not using:
            del self._using[adapter]
        freed: list[Sequence] = []
        while self._parked:
            first = next(iter(self._parked))
            if first not in self._using and len(self._using) >= self._max_loras:
                break
            queue = self._parked.pop(first)
            del self._num_overtaken[first]
            self._using.setdefault(first, set()).update(one.seq for one in queue)
            freed += queue
        return freed

    def counts(self) -> AdapterCounts:
        return AdapterCounts(self._max_loras, self.running, self.waiting)

    def check(self) -> None:
        """Assert every invariant; for tests."""
        assert len(self._using) <= self._max_loras and all(self._using.values())
        assert self._parked.keys() == self._num_overtaken.keys() and all(self._parked.values())
        assert not self._parked or self._using, "sequences are parked, and no adapter has a slot"
