"""Plans the steps of an encoder: each waiting text is computed whole, in the step in which it starts.

So no row is left to plan for: those that run are in steps in flight, have all their blocks and end with their results.
"""

import numpy as np

from pipeline.runtime import messages as m
from pipeline.stages.schedule.kv_cache.windows import AppendedBlocks
from pipeline.stages.schedule.lifecycle import SequenceLifecycle
from pipeline.stages.schedule.policies.budget import BudgetLimits, StepBudget
from pipeline.stages.schedule.request import Sequence
from pipeline.stages.schedule.state import SchedulerState
from pipeline.stages.schedule.steps.step_builder import StepBuilder
from pipeline.stages.schedule.steps.step_entries import StepEntries


class EncoderPlanner:
    """Has the methods of `Planner`."""

    def __init__(self, state: SchedulerState, lifecycle: SequenceLifecycle) -> None:
        self._limits = BudgetLimits(state.config.max_num_batched_tokens)
        self._rows = state.rows
        self._kv_cache_manager = state.kv_cache_manager
        self._lifecycle = lifecycle
        self._cost_model = state.cost_model
        self._builder = StepBuilder(state)
        self._in_flight = state.in_flight
        self._put = state.put_step
        self._breadcrumb = state.context.breadcrumb
        self._began_long = False
        """Whether the last step began with a long text: then short ones go first."""

    def repeat(self) -> None:
        """No step differs from the last one by a position of each row only."""

    def plan(self, *, registers: bool = True) -> m.Step | None:
        """Return the next step, or None if there is nothing to compute now."""
        lifecycle, rows = self._lifecycle, self._rows
        if not lifecycle.waiting:
            return None
        self._kv_cache_manager.begin_plan(self._in_flight.last_step_id + 1)
        budget = StepBudget(self._limits, self._cost_model, 0, 0)
        adds: list[m.RowAdd] = []
        while rows.num_free:
            prefers_short = self._began_long and not adds
            sequence = lifecycle.waiting.choose_whole(budget.fits, prefers_short=prefers_short)
            if sequence is None or (add := self._start(sequence)) is None:
                break
            if not adds:
                self._began_long = bool(rows.is_long[add.row])
            granted = budget.chunk(0, add.num_prompt, False, whole=True)
            assert granted == add.num_prompt, f"a text of {add.num_prompt} tokens got {granted}"
            adds.append(add)
        if not adds:
            assert self._in_flight.steps, "texts wait, and none can start"
            return None
        started, counts = (
            np.array(each, np.int64) for each in zip(*((a.row, a.num_prompt) for a in adds), strict=True)
        )
        rows.num_computed_tokens[started] = counts
        rows.num_output_placeholders[started] = 1
        entries = StepEntries(started, np.zeros(len(started), np.int64), counts, counts > 0)
        return self._builder.build([entries], AppendedBlocks(), adds, budget.shape)

    def _start(self, sequence: Sequence) -> m.RowAdd | None:
        """Start a sequence, or return None if there are too few blocks: those in flight release theirs."""
        request, ids = sequence.request, sequence.ids  # the ids move into the row
        with self._breadcrumb.at(request.request_id, request.attempt):
            started = self._lifecycle.start(sequence, 0)
        if started is None:
            return None
        row, _, (table,) = started
        return m.RowAdd(
            row=row,
            generation=int(self._rows.generation[row]),
            index=sequence.row_index,
            ids=self._put(ids),
            num_prompt=len(ids),
            blocks=self._put(np.array(table.blocks, np.int32)),
            options=request.row_options,
            request_id=request.request_id,
        )
