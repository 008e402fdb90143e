"""Parallel samples: sequences of a request with n > 1 that wait until one of them has computed the prompt, to fork
from.

admitted                                          the first sequence waits like any other; the others are parked
a planned step computes the rest of the prompt    the others join the waiting queue and fork when they start
the first sequence ends before that               the next one joins the waiting queue
"""

from collections.abc import Iterator

from pipeline.stages.schedule.request import RequestState, Sequence
from pipeline.stages.schedule.rows import RowTracker


class ParallelSamples:
    """Owns the parked sequences."""

    def __init__(self) -> None:
        self._parked: dict[int, dict[int, Sequence]] = {}
        """By request id and index."""
        self._running: dict[int, RequestState] = {}
        """Requests with parked sequences of which another has started. Only these are checked in each plan."""
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

    def is_parked(self, sequence: Sequence) -> bool:
        return sequence.index in self._parked.get(sequence.request.request_id, {})

    def remove(self, sequence: Sequence) -> None:
        request_id = sequence.request.request_id
        del self._parked[request_id][sequence.index]
        self._num -= 1
        if not self._parked[request_id]:
            del self._parked[request_id]
            self._running.pop(request_id, None)

    def on_start(self, sequence: Sequence) -> None:
        """A sequence has a row: check from now on whether it has computed the prompt for its parked samples."""
        if sequence.request.beam_search is not None:
            return  # its beams are parked until it has chosen their first ids
        if sequence.request.n > 1 and sequence.request.request_id in self._parked:
            self._running[sequence.request.request_id] = sequence.request

    @property
    def any_running(self) -> bool:
        return bool(self._running)

    def take_ready(self, rows: RowTracker) -> list[Sequence]:
        """Remove and return the sequences whose prompt is computed by an earlier step, or by one in flight."""
        ready: list[Sequence] = []
        for request_id, request in list(self._running.items()):
            running = [other.row for other in request.open_sequences.values() if other.row >= 0]
            if not running:
                del self._running[request_id]  # it was preempted; `on_start` adds it again
            elif any(rows.num_computed_before[row] >= len(request.prompt) for row in running):
                ready += self._parked[request_id].values()
        for sequence in ready:
            self.remove(sequence)
        return ready

    def take_next(self, request: RequestState, has_computed: bool) -> list[Sequence]:
        """Call when a sequence has ended. If only parked sequences are left, remove and return those that now wait: the
        next one, or all of them if the last `has_computed` the prompt, since its blocks may be cached."""
        parked = self._parked.get(request.request_id)
        if not parked or len(parked) < len(request.open_sequences):
            return []
        taken = list(parked.values()) if has_computed else [next(iter(parked.values()))]
        for sequence in taken:
            self.remove(sequence)
        return taken
