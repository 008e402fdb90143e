"""The beams of beam searches as sequences: what becomes of their rows and KV blocks when a search goes one step on.

    a beam's result comes      its row waits: it has nothing to compute before the search has chosen its next id
    all beams have theirs      a beam that goes on with the sampled id keeps its row as it is
                               one that goes on with another id is sent to the executor again, with the same blocks
                               one that ends takes over another beam: all full blocks are shared, and the last one, if
                               it is not full, is copied into its own
    a beam has no row          it was preempted, or never had one: it waits with its new ids like any other sequence

So a search is never ahead of its results, though other rows may be. Beams are preempted one by one, and the others
wait for them with their blocks. If nothing can run because of that, the last search gives up all its blocks
(`SequenceLifecycle.preempt_stalled_beams`).
"""

import numpy as np

from pipeline.runtime.messages import Finish
from pipeline.stages.schedule.arrays import Ids, Int64s
from pipeline.stages.schedule.lifecycle import SequenceLifecycle
from pipeline.stages.schedule.request import RequestState, Sequence
from pipeline.stages.schedule.state import SchedulerState


class Beams:
    """Takes the results of beams, and moves beams when a search has all of them. Owns the searches that are complete
    until then."""

    def __init__(self, state: SchedulerState, lifecycle: SequenceLifecycle) -> None:
        self._state = state
        self._rows = state.rows
        self._kv_cache_manager = state.kv_cache_manager
        self._lifecycle = lifecycle
        self._in_flight = state.in_flight
        self._complete: dict[int, RequestState] = {}
        """By request id."""

    def take(self, sampled: Int64s, ids: Ids) -> None:
        """Note the ids that were sampled for these rows, with the token outputs that their sequences have got."""
        rows = self._rows
        rows.num_output_placeholders[sampled] -= 1
        for row, token_id in zip(sampled.tolist(), ids.tolist(), strict=True):
            sequence = rows.sequences[row]
            assert sequence is not None and sequence.request.beam_search is not None
            request, search = sequence.request, sequence.request.beam_search
            token_output = bytes(sequence.token_outputs)
            sequence.token_outputs.clear()
            if not sequence.first_s:
                self._begin(sequence)
            if search.take(sequence.index, token_id, token_output):
                self._complete[request.request_id] = request

    def _begin(self, sequence: Sequence) -> None:
        """A request has its first result. Its other sequences share what the first one has computed."""
        for other in sequence.request.sequences:
            other.first_s = self._state.now_s
            other.started_s, other.num_cached = sequence.started_s, sequence.num_cached

    def step(self) -> list[RequestState]:
        """Go one step on with all searches that have their results. Returns those that are over; the caller counts
        them."""
        complete, self._complete = self._complete, {}
        return [request for request in complete.values() if request.open_sequences and self._step(request)]

    def _step(self, request: RequestState) -> bool:
        """Returns whether the search is over."""
        search, sequences = request.beam_search, request.open_sequences
        assert search is not None
        known = {beam.slot: self._ids_of(sequences[beam.slot]) for beam in search.beams}
        num_ids = len(known[search.beams[0].slot])
        sampled = search.sampled_ids
        moves = search.step(num_ids, known.__getitem__)
        if not moves:
            self._finish(request)
            return True
        # Beams are taken over before they change.
        for slot, parent, token_id in moves:
            if slot != parent:
                self._take_over(sequences[slot], sequences[parent], known[parent], token_id)
        for slot, parent, token_id in moves:
            if slot == parent:
                self._go_on(sequences[slot], known[slot], token_id, sampled[slot])
        return False

    def _ids_of(self, sequence: Sequence) -> Ids:
        """A copy of its ids."""
        return sequence.ids if sequence.row < 0 else self._lifecycle.ids_of(sequence.row).copy()

    def _is_ready(self, sequence: Sequence) -> bool:
        """Whether its row has computed all its ids, in steps that are settled or in flight."""
        row = sequence.row
        return row >= 0 and bool(self._rows.num_computed_tokens[row] == self._rows.num_tokens[row])

    def _go_on(self, sequence: Sequence, ids: Ids, token_id: int, sampled_id: int) -> None:
        """A beam gets its next id."""
        row, rows = sequence.row, self._rows
        if row < 0:
            sequence.ids = _appended(ids, token_id)
            return
        if token_id != sampled_id or rows.num_output_placeholders[row] or not self._is_ready(sequence):
            self._renew(row)
        rows.ids[row, len(ids)] = token_id
        rows.num_tokens[row] = len(ids) + 1

    def _take_over(self, sequence: Sequence, parent: Sequence, ids: Ids, token_id: int) -> None:
        """A sequence whose beam ends, or that had none, goes on with the ids and blocks of another one."""
        rows = self._rows
        if not (self._is_ready(sequence) and self._is_ready(parent)):
            self._lifecycle.wait_with(sequence, _appended(ids, token_id))
            return
        row = sequence.row
        self._kv_cache_manager.fork_row(row, parent.row, self._in_flight.last_in_flight)
        rows.ids[row, : len(ids)] = ids
        rows.ids[row, len(ids)] = token_id
        rows.num_tokens[row] = len(ids) + 1
        self._renew(row)

    def _renew(self, row: int) -> None:
        """The executor gets the row again. What a step in flight samples for it is dropped."""
        rows = self._rows
        rows.generation[row] += 1
        rows.num_output_placeholders[row] = 0
        rows.num_changes += 1
        self._in_flight.renew_row(row)

    def _finish(self, request: RequestState) -> None:
        search = request.beam_search
        assert search is not None
        for sequence, found in zip(request.sequences, search.hypotheses, strict=True):
            if sequence.resumed_finish != Finish.NONE:  # the client has it
                self._lifecycle.finish(sequence, sequence.resumed_finish)
                continue
            num_resumed_tokens = sequence.num_resumed_tokens - len(request.prompt)
            sequence.token_outputs = bytearray(found.token_outputs[num_resumed_tokens * request.token_output_bytes :])
            self._lifecycle.finish(sequence, found.finish, found.ids)


def _appended(ids: Ids, token_id: int) -> Ids:
    return np.append(ids, np.int32(token_id)).astype(np.int32)
