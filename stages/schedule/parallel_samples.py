"""Siblings of n > 1 that wait for one of them to compute their prompt, so that they can fork from it.

admitted: the first waits like any other, and leads; the others are parked
its prompt is computed by a step that is planned: the others wait, and find it when they start
it ends before: the next of them leads
"""

from collections.abc import Iterator

from pipeline.stages.schedule.request import PromptRequest, Sequence
from pipeline.stages.schedule.rows import Rows


class ParallelSamples:
    """Owns who is parked."""

    def __init__(self) -> None:
        self._parked: dict[int, dict[int, Sequence]] = {}
        """By request and index."""
        self._led: dict[int, PromptRequest] = {}
        """Requests with parked ones of which another runs, or ran: the only ones that are looked at in each plan."""
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for parked in self._parked.values() for sequence in parked.values())

    def __contains__(self, sequence: object) -> bool:
        return any(other is sequence for other in self)

    def park(self, sequence: Sequence) -> None:
        self._parked.setdefault(sequence.request.request_id, {})[sequence.index] = sequence
        self._num += 1

    def holds(self, sequence: Sequence) -> bool:
        return sequence.index in self._parked.get(sequence.request.request_id, {})

    def remove(self, sequence: Sequence) -> None:
        """Take one out: it waits or ends."""
        request_id = sequence.request.request_id
        del self._parked[request_id][sequence.index]
        self._num -= 1
        if not self._parked[request_id]:
            del self._parked[request_id]
            self._led.pop(request_id, None)

    def started(self, sequence: Sequence) -> None:
        """A sequence has a row: its parked siblings, if it has any, are looked at from now on."""
        if sequence.request.n > 1 and sequence.request.request_id in self._parked:
            self._led[sequence.request.request_id] = sequence.request

    @property
    def any_led(self) -> bool:
        return bool(self._led)

    def take_ready(self, rows: Rows) -> list[Sequence]:
        """Those whose prompt has been computed by an earlier step, or by one in flight."""
        ready: list[Sequence] = []
        for request_id, request in list(self._led.items()):
            running = [other.row for other in request.open_sequences.values() if other.row >= 0]
            if not running:
                del self._led[request_id]  # it was put back, and is looked at again when it runs again
            elif any(rows.ahead[row] >= len(request.prompt) for row in running):
                ready += self._parked[request_id].values()
        for sequence in ready:
            self.remove(sequence)
        return ready

    def take_next(self, request: PromptRequest, has_computed: bool) -> list[Sequence]:
        """Who waits from now on, where all that were not parked have ended: the next, which leads, or all, where the
        last `has_computed` the prompt: they find what of it is cached."""
        parked = self._parked.get(request.request_id)
        if not parked or len(parked) < len(request.open_sequences):
            return []
        taken = list(parked.values()) if has_computed else [next(iter(parked.values()))]
        for sequence in taken:
            self.remove(sequence)
        return taken
