"""Settles step results: from then on the sampled ids can't change."""

from typing import Any

import numpy as np

from pipeline.runtime import messages as m
from pipeline.runtime.messages import Finish
from pipeline.stages.schedule.arrays import Bools, Ids, Int64s
from pipeline.stages.schedule.lifecycle import SequenceLifecycle
from pipeline.stages.schedule.output.token_outputs import take_prompt_logprobs, take_token_outputs
from pipeline.stages.schedule.request import Sequence
from pipeline.stages.schedule.row_flags import RowFlag
from pipeline.stages.schedule.samples.beams import Beams
from pipeline.stages.schedule.state import SchedulerState
from pipeline.stages.schedule.steps.decode_run import DecodeRun
from pipeline.stages.schedule.steps.step_entries import InFlightStep

NO_DRAFTS: Int64s = np.zeros(0, np.int64)


class Settlement:
    """Owns what results add up to."""

    def __init__(self, state: SchedulerState, lifecycle: SequenceLifecycle, beams: Beams) -> None:
        self.traced_request_ids: list[int] = []
        """Requests with a sequence that began or finished in the last result; for traces."""
        self.num_output_tokens = 0
        self.is_behind = False
        """Whether the step after the next result is planned already, and full blocks are to be registered."""
        self._state = state
        self._rows = state.rows
        self._kv_cache_manager = state.kv_cache_manager
        self._lifecycle = lifecycle
        self._in_flight = state.in_flight
        self._cost_model = state.cost_model
        self._output_buffer = state.output_buffer
        self._speculation = state.speculation
        self._mask_turns = state.mask_turns
        self._media = state.media
        self._beams = beams
        self._take = state.context.take

    def settle(self, result: m.StepResult) -> None:
        """Store what the oldest step in flight sampled, and finish sequences."""
        step = self._in_flight.steps.popleft()
        assert result.step_id == step.step_id, f"a result of step {result.step_id} came, step {step.step_id} is due"
        if step.run is not None and self._repeats(step.run, result):
            self._settle_repeated(step, step.run, result)
            return
        self._output_buffer.settled_run = None
        rows, take = self._rows, self._take
        sampled = take(result.rows, np.int32).astype(np.int64)
        ids = take(result.ids, np.int32)
        finishes = take(result.finishes, np.uint8)
        generations = take(result.generations, np.uint32)  # also if it is not needed: what is not taken is not freed
        assert len(sampled) == step.num_samples, (
            f"step {step.step_id} has {len(sampled)} samples, {step.num_samples} were expected"
        )
        # Nearly always empty: one id each.
        num_ids = num_drafts = NO_DRAFTS
        if result.num_ids or result.num_drafts:
            num_ids, num_drafts = (take(one, np.int32).astype(np.int64) for one in (result.num_ids, result.num_drafts))
        is_changed = rows.num_changes != step.num_changes
        current = self._current(sampled, generations) if is_changed else sampled >= 0
        if step.has_drafts is not None:
            rows.num_drafts[sampled[step.has_drafts & current]] = 0
        if (expected := step.expected_logprobs) is not None:
            token_outputs = take(result.token_outputs, np.uint8).tobytes()
            take_token_outputs(rows, expected, sampled, ids, current, token_outputs, num_ids if len(num_ids) else None)
            take_prompt_logprobs(rows, expected, take(result.prompt_logprobs, np.uint8).tobytes(), self._output_buffer)
        self.traced_request_ids = []
        if result.errors:
            failed = finishes == Finish.ERROR
            self._finish_failed(sampled[current & failed], sampled[failed], result.errors)
            current &= ~failed & rows.active[sampled]  # other beams of a search that has failed
        if np.count_nonzero(current) < len(current):
            ids = ids[np.repeat(current, num_ids)] if len(num_ids) else ids[current]
            num_ids, num_drafts = num_ids[current[: len(num_ids)]], num_drafts[current[: len(num_drafts)]]
            sampled, finishes = sampled[current], finishes[current]
        assert np.count_nonzero(ids < 0) == 0, f"step {step.step_id} has no id for a running row"
        if result.slow_rows or rows.all_flags & RowFlag.PACED:
            self._mask_turns.observe(sampled, result.slow_rows, result.slow_s, self._state.now_s)
        if self._lifecycle.quarantine.is_active:
            for row in sampled.tolist():
                self._lifecycle.quarantine.settled(self._sequence(row).request.request_id)
        if rows.all_flags & RowFlag.BEAM and np.count_nonzero(is_beam := rows.have(RowFlag.BEAM, sampled)):
            is_beam_id = np.repeat(is_beam, num_ids) if len(num_ids) else is_beam
            self._beams.take(sampled[is_beam], ids[is_beam_id])
            ids, sampled, finishes = ids[~is_beam_id], sampled[~is_beam], finishes[~is_beam]
            num_ids, num_drafts = num_ids[~is_beam[: len(num_ids)]], num_drafts[~is_beam[: len(num_drafts)]]
        if len(num_ids):
            self._speculation.observe(sampled, num_drafts, num_ids - 1, finishes == Finish.STOP)
            for index in np.flatnonzero(rows.have(RowFlag.PREDICTION, sampled)).tolist():
                sequence, accepted = self._sequence(int(sampled[index])), int(num_ids[index]) - 1
                sequence.num_accepted_drafts += accepted
                sequence.num_rejected_drafts += int(num_drafts[index]) - accepted
        self._store(sampled, ids, finishes, num_ids)
        if self.is_behind:
            self._kv_cache_manager.register(rows.order)
            self.is_behind = False
        self._kv_cache_manager.settle(step.step_id)
        for request in self._beams.step():
            self.traced_request_ids.append(request.request_id)
            self.num_output_tokens += sum(len(one.ids) - len(request.prompt) for one in request.sequences)
        self._learn(step, result, num_drafts)

    def _repeats(self, run: DecodeRun, result: m.StepResult) -> bool:
        """Whether the result has one id for each row of a run, and ends no sequence."""
        is_plain = result.rows == run.row_ids and result.finishes == run.finishes
        return (
            is_plain
            and not (result.errors or result.slow_rows)
            and run.is_valid
            and not self._lifecycle.quarantine.is_active
        )

    def _settle_repeated(self, step: InFlightStep, run: DecodeRun, result: m.StepResult) -> None:
        """`settle` for a step of a run: no sequence begins or ends with it."""
        assert isinstance(result.ids, bytes), "the rows came inline and their ids did not"
        num_tokens = run.settle(result.ids)
        self.num_output_tokens += run.num_rows
        self._output_buffer.settled_run = run
        self.traced_request_ids = []
        if self.is_behind:
            self._kv_cache_manager.register_if_full(run.order, num_tokens)
            self.is_behind = False
        self._kv_cache_manager.settle(step.step_id)
        self._learn(step, result, NO_DRAFTS)

    def _current(self, sampled: Int64s, generations: "np.ndarray[Any, np.dtype[np.uint32]]") -> Bools:
        """Which rows still have the sequence that the step computed."""
        is_same = self._rows.generation[sampled] == generations
        current: Bools = self._rows.active[sampled] & is_same
        return current

    def _store(
        self, sampled: Int64s, ids: Ids, finishes: "np.ndarray[Any, np.dtype[np.uint8]]", num_ids: Int64s
    ) -> None:
        """Append ids to each of these rows, `num_ids` or one, and finish the sequences that end with them."""
        rows = self._rows
        num_tokens = rows.num_tokens[sampled]
        if len(num_ids):
            # Accepted proposals were computed with the rest of the row.
            following = num_tokens + num_ids
            rows.num_computed_tokens[sampled] += num_ids - 1
            offset = np.arange(len(ids)) - np.repeat(num_ids.cumsum() - num_ids, num_ids)
            rows.ids[np.repeat(sampled, num_ids), np.repeat(num_tokens, num_ids) + offset] = ids
        else:
            following = num_tokens + 1
            rows.ids[sampled, num_tokens] = ids
        rows.num_tokens[sampled] = following
        rows.num_output_placeholders[sampled] -= 1
        self.num_output_tokens += len(ids)
        begun = num_tokens == rows.num_resumed_tokens[sampled]
        if np.count_nonzero(begun):
            for row in sampled[begun].tolist():
                self._traced_sequence(row).first_s = self._state.now_s
        stopped = finishes == Finish.STOP
        ended = stopped | (following >= rows.max_num_tokens[sampled])
        if np.count_nonzero(ended):
            for row, by_stop in zip(sampled[ended].tolist(), stopped[ended].tolist(), strict=True):
                self._lifecycle.finish(self._traced_sequence(row), Finish.STOP if by_stop else Finish.LENGTH)

    def _finish_failed(self, running: Int64s, failed: Int64s, errors: list[str]) -> None:
        """Finish the sequences that the executor could not sample. It gives a reason for each row in `failed`; rows in
        `running` still have the sequence that the step computed."""
        reasons = dict(zip(failed.tolist(), errors, strict=True))
        for row in running.tolist():
            if not self._rows.active[row]:
                continue  # it was a beam of a search that has failed
            sequence = self._traced_sequence(row)
            request = sequence.request
            failing = [sequence] if request.beam_search is None else list(request.open_sequences.values())
            for one in failing:
                one.error = reasons[row]
                self._lifecycle.finish(one, Finish.ERROR)

    def _sequence(self, row: int) -> Sequence:
        sequence = self._rows.sequences[row]
        assert sequence is not None
        return sequence

    def _traced_sequence(self, row: int) -> Sequence:
        sequence = self._sequence(row)
        self.traced_request_ids.append(sequence.request.request_id)
        return sequence

    def _learn(self, step: InFlightStep, result: m.StepResult, num_drafts: Int64s) -> None:
        """Learn from a step's times: for the budgets of later steps, and for the costs of preemption. A proposed id
        counts as one more row that decodes."""
        if step.num_copies:
            self._kv_cache_manager.copies.observe(step.num_copies, result.copy_s)
        if result.draft_pass_s:
            self._speculation.observe_pass(result.draft_pass_s)
        if self._media.is_on:
            self._media.costs.observe(
                step.num_rows_encoded,
                step.encode_s,
                result.encode_s,
                result.compute_s,
                decodes=step.num_samples > 0,
                decodes_only=step.num_samples == step.num_tokens,
            )
        if (shape := step.shape) is not None:
            seconds = result.compute_s - result.copy_s - result.draft_s - result.encode_s
            num_decodes, context = shape.num_decodes, shape.context
            if len(num_drafts):
                num_decodes += int(num_drafts.sum())
                context = context * num_decodes // shape.num_decodes
            if not shape.num_chunk_tokens:
                self._speculation.observe_step(num_decodes, seconds)
            self._cost_model.observe(num_decodes, context, shape.num_chunk_tokens, shape.pairs, seconds)
