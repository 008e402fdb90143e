"""Puts a plan into a `Step` message."""

from typing import Any

import numpy as np

from pipeline.runtime import messages as m
from pipeline.shm.arrays import Array
from pipeline.stages.schedule.arrays import Bools, Int64s
from pipeline.stages.schedule.kv_cache.windows import AppendedBlocks
from pipeline.stages.schedule.output.token_outputs import expect_logprobs
from pipeline.stages.schedule.policies.budget import StepCostInputs
from pipeline.stages.schedule.row_flags import RowFlag
from pipeline.stages.schedule.state import SchedulerState
from pipeline.stages.schedule.steps.decode_run import DecodeRun
from pipeline.stages.schedule.steps.step_entries import InFlightStep, StepEntries, joined

LEARN_EVERY = 8
"""The cost model learns from one of this many decode-only steps: they are all alike."""


class StepBuilder:
    """Numbers steps, notes them as in flight, and chooses those that the cost model learns from."""

    def __init__(self, state: SchedulerState) -> None:
        self._rows = state.rows
        self._copies = state.kv_cache_manager.copies
        self._has_states = state.kv_cache_manager.states.is_on
        self._state_copies = state.kv_cache_manager.states.copies
        self._media = state.media
        self._in_flight = state.in_flight
        self._metrics = state.metrics
        self._put = state.put_step
        self._incarnation = state.context.incarnation
        self._num_decode_steps = 0

    def learns(self, has_chunks: bool) -> bool:
        """Whether the cost model learns from the next step."""
        return has_chunks or self._num_decode_steps % LEARN_EVERY == 0

    def build(
        self,
        entries: list[StepEntries],
        appended: AppendedBlocks,
        adds: list[m.RowAdd],
        shape: StepCostInputs,
        drafts: Int64s | None = None,
    ) -> m.Step:
        """Build the message, decoding rows first. `shape` is what was granted, `drafts` the ids that may be proposed
        for each of the first `entries`."""
        computed = joined(entries)
        if drafts is not None:
            drafts = np.concatenate((drafts, np.zeros(len(computed.rows) - len(drafts), np.int64)))
        if shape.num_chunk_tokens and len(computed.rows) > 1:
            by_kind = (computed.counts > 1).argsort(kind="stable")
            computed = computed.taken(by_kind)
            drafts = None if drafts is None else drafts[by_kind]
        step_id = self._note(computed, shape, None if drafts is None else drafts[computed.samples] > 0)
        sources, targets = self._copies.take()
        put = self._put
        return m.Step(
            incarnation=self._incarnation,
            step_id=step_id,
            drops=self._put_list(self._in_flight.take_dropped_rows()),
            adds=adds,
            block_rows=self._put_list(appended.rows),
            block_ids=self._put_list(appended.blocks),
            rows=put(computed.rows.astype(np.int32)),
            starts=put(computed.starts.astype(np.int32)),
            counts=put(computed.counts.astype(np.int32)),
            samples=put(computed.samples.view(np.uint8)),
            copy_sources=self._put_list(sources),
            copy_targets=self._put_list(targets),
            block_groups=put(np.array(appended.groups, np.uint8)) if any(appended.groups) else b"",
            drafts=b"" if drafts is None else put(drafts.astype(np.int32)),
            **self._state_fields(computed) if self._has_states else {},
            **self._media.take_fields() if self._media.is_on else {},
        )

    def repeat(self, run: DecodeRun, appended: AppendedBlocks) -> m.Step:
        """Build the message of a step that differs from the last one by a position of each row, and by the blocks
        `appended`."""
        num, starts, shape = run.num_rows, run.starts.tobytes(), None
        if self.learns(has_chunks=False):
            shape = StepCostInputs(num, run.context)
        self._num_decode_steps += 1
        self._metrics.step_tokens.observe(num)
        step_id = self._in_flight.next_step_id()
        self._in_flight.steps.append(
            InFlightStep(step_id, num, num, run.num_changes, 0, shape, flags=self._rows.all_flags, run=run)
        )
        run.repeat()
        return m.Step(
            incarnation=self._incarnation,
            step_id=step_id,
            drops=b"",
            adds=[],
            block_rows=self._put_list(appended.rows),
            block_ids=self._put_list(appended.blocks),
            rows=run.row_ids,
            starts=starts,
            counts=run.counts,
            samples=run.samples,
        )

    def _note(self, computed: StepEntries, shape: StepCostInputs, has_drafts: Bools | None) -> int:
        """Note a step as in flight. Returns its id."""
        num_tokens = int(np.add.reduce(computed.counts))
        self._metrics.step_tokens.observe(num_tokens)
        # If rows were preempted, the step computes less than was granted.
        is_as_granted = num_tokens == shape.num_decodes + shape.num_chunk_tokens
        learns = (has_drafts is not None or self.learns(shape.num_chunk_tokens > 0)) and is_as_granted
        self._num_decode_steps += shape.num_chunk_tokens == 0
        num_samples = int(np.count_nonzero(computed.samples))
        expected = expect_logprobs(self._rows, computed)
        learns &= expected is None or not expected.prompts  # logprobs of a prompt take longer than its KV
        num_rows_encoded, encode_s = self._media.take_encoded()
        learns &= not num_rows_encoded  # a pipeline's last stage does not say what they took
        step_id = self._in_flight.next_step_id()
        step_shape = shape if learns else None
        num_changes = self._rows.num_changes
        # The step's time does not say what copies of states took.
        has_state_copies = self._has_states and self._state_copies.num_swap_copies
        num_swap_copies = 0 if has_state_copies else self._copies.num_swap_copies
        flags = self._rows.all_flags
        if has_drafts is None:
            flags &= ~RowFlag.DRAFTS
        step = InFlightStep(
            step_id, num_samples, num_tokens, num_changes, num_swap_copies, step_shape, expected, has_drafts, flags,
            num_rows_encoded=num_rows_encoded, encode_s=encode_s,
        )  # fmt: skip
        self._in_flight.steps.append(step)
        return step_id

    def _state_fields(self, computed: StepEntries) -> dict[str, Any]:
        """The fields of a step of a model with recurrent layers."""
        sources, targets = self._state_copies.take()
        return {
            "state_reads": self._put(computed.state_reads.astype(np.int32)),
            "state_writes": self._put(computed.state_writes.astype(np.int32)),
            "state_copy_sources": self._put_list(sources),
            "state_copy_targets": self._put_list(targets),
        }

    def _put_list(self, values: list[int]) -> Array:
        """As int32. Nearly always the list is empty."""
        return self._put(np.array(values, np.int32)) if values else b""
