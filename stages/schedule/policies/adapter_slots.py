"""Bounds how many LoRA adapters run at once.

An adapter has a slot while one of its sequences waits for its turn, runs, or is swapped out. Those that the quarantine
holds back have none, so that suspects find one. Sequences of adapters without a slot are parked here, so they delay no
others; the adapter that has waited longest gets the next free slot.

    a sequence is added ──slot──► the scheduler's queues ──finished──► the slot is free when none is left
            │                            ▲
            └──no slot──► parked ────────┘

An adapter that has just got a slot may not be in the executor's memory. Its sequences stay here until the executor has
loaded it, beside the steps of others (`UseAdapters`, `AdaptersLoaded`).

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

    def __init__(self, max_loras: int, *, waits: bool = False) -> None:
        """With `waits`, sequences wait until the executor has loaded their adapter."""
        self._max_loras, self._waits = max_loras, waits
        self._loading: dict[str, SequenceQueue] = {}
        """By adapter with a slot that is not loaded: its sequences."""
        self._named: list[str] = []
        """What the last message to the executor named; it keeps these."""
        self._loaded: set[str] = set()
        """Those of them that it has loaded."""
        self._number = 0
        self._is_unanswered = False
        self._using: dict[str, set[int]] = {}
        """By adapter with a slot: its sequences in the scheduler's queues and rows, by `Sequence.seq`."""
        self._parked: dict[str, SequenceQueue] = {}
        """By adapter, the one that has waited longest first."""
        self._num_overtaken: dict[str, int] = {}

    def __len__(self) -> int:
        """Parked sequences, and those that wait for the executor."""
        return sum(len(queue) for queues in (self._parked, self._loading) for queue in queues.values())

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for queues in (self._parked, self._loading) for queue in queues.values() for sequence in queue)

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
        """Whether a sequence may go on: it has no adapter, or one with a slot that is loaded. Else it is parked."""
        if not self._takes_slot(sequence):
            return False
        if self.is_loaded(sequence):
            return True
        self._loading.setdefault(sequence.request.adapter_id, SequenceQueue()).add(sequence)
        return False

    def is_loaded(self, sequence: Sequence) -> bool:
        """Whether the executor has loaded a sequence's adapter; true if it has none."""
        adapter = sequence.request.adapter_id
        return not (self._waits and adapter) or adapter in self._loaded

    @property
    def is_loading(self) -> bool:
        """Whether sequences with a slot wait for the executor."""
        return self._waits and not self._using.keys() <= self._loaded

    def next_message(self) -> tuple[int, list[str]] | None:
        """The number and the adapters of the next message to the executor, if adapters have got a slot since the last
        one. There is none before it has answered that."""
        if self._is_unanswered or not self._waits or self._using.keys() <= set(self._named):
            return None
        self._number += 1
        self._is_unanswered = True
        self._named = list(self._using)
        self._loaded &= self._using.keys()
        return self._number, self._named

    def loaded(self, number: int, adapters: list[str]) -> list[Sequence]:
        """The executor has loaded adapters of a message. Returns the sequences that waited for them."""
        if number != self._number:
            return []
        self._is_unanswered = False
        self._loaded.update(adapters)
        return [one for adapter in adapters if adapter in self._loading for one in self._loading.pop(adapter)]

    def executor_lost(self) -> None:
        """The executor's successor has loaded nothing."""
        self._named, self._loaded, self._is_unanswered = [], set(), False

    def _takes_slot(self, sequence: Sequence) -> bool:
        """Whether a sequence needs no slot, or its adapter has one or gets one. Otherwise it is parked."""
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
        return any(adapter in queues and sequence in queues[adapter] for queues in (self._parked, self._loading))

    def remove(self, sequence: Sequence) -> None:
        """A parked sequence has ended, or one that waits for the executor."""
        adapter = sequence.request.adapter_id
        queues = self._parked if adapter in self._parked and sequence in self._parked[adapter] else self._loading
        queues[adapter].remove(sequence)
        if not queues[adapter]:
            del queues[adapter]
            if queues is self._parked:
                del self._num_overtaken[adapter]

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
        for adapter, queue in self._loading.items():
            assert queue and adapter not in self._loaded and {one.seq for one in queue} <= self._using[adapter]
