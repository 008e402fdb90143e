"""A stage of a pipeline, beside its program: what it gets from other stages in a step, and what it gives them.

    begin ──► await_ids ──► receive ──► program ──► send, or publish ids in the last stage ──► end

Only the last stage samples. The others append a row's ids when a step computes the row again: meanwhile they compute
other rows. They must have appended the ids of a step before they compute a step as many later as there are stages.
"""

import time
from collections import deque
from typing import NamedTuple

import numpy as np

from pipeline.kernels.sampling.logprob_inputs import FloatArray
from pipeline.kernels.sampling.sampling_inputs import NO_ID
from pipeline.kernels.step_inputs import IntArray, LongArray
from pipeline.stages.execute.cpu.ranks.pp_link import PPLink
from pipeline.stages.execute.ranks.context import RankContext
from pipeline.stages.execute.rows import RowTable


class ExpectedIds(NamedTuple):
    """Ids that the last stage samples in a step."""

    number: int
    rows: IntArray
    epochs: LongArray
    """How often each row had been dropped when the step came: a row that has been dropped since gets no id."""


class PPStage:
    """Owned by the runner. A rank of the last stage has no promises: it knows all ids."""

    def __init__(self, link: PPLink, context: RankContext, rows: RowTable) -> None:
        self._link, self._context, self._rows = link, context, rows
        self._expected: deque[ExpectedIds] = deque()
        self._epochs: LongArray = np.zeros(len(rows.num_ids), np.int64)
        self._promised: LongArray = np.zeros(len(rows.num_ids), np.int64)
        """By row: the last step that samples an id for it."""
        self._began_s = self._waited_s = self._before_s = 0.0

    @property
    def elsewhere_s(self) -> float:
        """Seconds that stages before have computed for the step, less those in which this one waited."""
        return self._before_s - (self._link.waited_s() - self._waited_s)

    def begin(self, incarnation: int, step_id: int) -> None:
        """A step has come."""
        self._began_s, self._waited_s, self._before_s = time.monotonic(), self._link.waited_s(), 0.0
        self._link.begin(incarnation, step_id)

    def drop(self, rows: IntArray) -> None:
        """Rows were dropped: ids that were promised to them are not appended."""
        self._epochs[rows] += 1
        self._promised[rows] = 0

    def announce(self, incarnation: int) -> None:
        """A new scheduler begins without rows."""
        self._link.announce(incarnation)
        self._expected.clear()
        self._promised[:] = 0

    def await_ids(self, rows: IntArray) -> None:
        """Append the ids that were promised to these rows, and those of all steps before. Raises RankLateError and
        StepAbandonedError."""
        if self._context.is_last_stage:
            return
        needed = self._link.number - self._context.num_stages
        if len(rows):
            needed = max(needed, int(np.maximum.reduce(self._promised[rows])))
        while self._expected and self._expected[0].number <= needed:
            expected = self._expected.popleft()
            self._append(expected, self._link.await_ids(expected.number))

    def _append(self, expected: ExpectedIds, ids: IntArray) -> None:
        assert len(ids) == len(expected.rows), f"{len(ids)} ids came, {len(expected.rows)} were promised"
        current = self._epochs[expected.rows] == expected.epochs
        has_id = current & (ids != NO_ID)
        self._rows.append_ids(expected.rows[has_id], ids[has_id])
        for row in expected.rows[current & ~has_id].tolist():
            self._rows.end(row)

    def receive(self, residual: FloatArray) -> None:
        """Get the hidden states [tokens, hidden_size] from the stage before. Raises as `await_ids`."""
        if self._context.stage:
            self._before_s = self._link.receive(residual, copies=self._context.rank == 0)

    def send(self, residual: FloatArray) -> None:
        """Give the hidden states to the next stage. Raises RankLateError."""
        if not self._context.is_last_stage and self._context.rank == 0:
            self._link.send(residual, time.monotonic() - self._began_s + self.elsewhere_s)

    def end(self, sampled: IntArray, ids: IntArray) -> None:
        """The step is computed. It samples for these rows, and in the last stage it has sampled `ids`, with `NO_ID` for
        rows that end without one. Raises RankLateError."""
        if not self._context.is_last_stage:
            number = self._link.number
            self._expected.append(ExpectedIds(number, sampled.copy(), self._epochs[sampled]))
            self._promised[sampled] = number
        elif self._context.rank == 0:
            self._link.publish(ids)
        self._link.end()
