"""The rows that a step computes, and the steps in flight."""

from collections import deque
from typing import NamedTuple

import msgspec
import numpy as np

from pipeline.runtime import messages as m
from pipeline.stages.schedule.arrays import NO_ROWS, Bools, Int64s
from pipeline.stages.schedule.policies.budget import StepCostInputs
from pipeline.stages.schedule.request import Sequence
from pipeline.stages.schedule.steps.decode_run import DecodeRun


class StepEntries(NamedTuple):
    """Rows that a step computes; parallel arrays."""

    rows: Int64s
    starts: Int64s
    counts: Int64s
    samples: Bools
    state_reads: Int64s = NO_ROWS
    """With recurrent layers, the slot of the state that each entry continues; else empty."""
    state_writes: Int64s = NO_ROWS
    """The slot of the state that it ends with."""

    def taken(self, indices: Int64s) -> "StepEntries":
        """The entries at these places, in their order."""
        taken = StepEntries(self.rows[indices], self.starts[indices], self.counts[indices], self.samples[indices])
        if not len(self.state_reads):
            return taken
        return taken._replace(state_reads=self.state_reads[indices], state_writes=self.state_writes[indices])


def joined(entries: list[StepEntries]) -> StepEntries:
    """Concatenate entries."""
    if len(entries) == 1:
        return entries[0]
    return StepEntries(*(np.concatenate(arrays) for arrays in zip(*entries, strict=True)))


class ExpectedPromptLogprobs(msgspec.Struct, frozen=True):
    """Logprob records that a step returns for a row's prompt ids."""

    row: int
    sequence: Sequence
    start: int
    """Records before these."""
    num: int
    width: int
    """Bytes of one record."""


class ExpectedLogprobs(msgspec.Struct, frozen=True):
    """Logprob records that a step in flight will return."""

    widths: Int64s
    """Bytes of the record of each sample; 0 for samples without one."""
    prompts: list[ExpectedPromptLogprobs]


class InFlightStep(msgspec.Struct, frozen=True):
    """A step that was sent to the executor and has no result yet."""

    step_id: int
    num_samples: int
    num_tokens: int
    num_changes: int
    """`RowTracker.num_changes` when it was planned: while that is the same, each row has the same sequence."""
    num_copies: int
    """Copies to and from swap space; 0 if the step makes other copies too."""
    shape: StepCostInputs | None
    """None if the cost model does not learn from the step."""
    expected_logprobs: ExpectedLogprobs | None = None
    has_drafts: Bools | None = None
    """Parallel with the samples: whether ids may be proposed for the row. None if they may for no row."""
    flags: int = 0
    """The flags of all rows (row_flags.py), with DRAFTS only if ids may be proposed in this step."""
    run: DecodeRun | None = None
    """The run that the step repeats a step of."""
    num_rows_encoded: float = 0.0
    """Rows of the encoder cache that the step writes; of items that it encodes in part, as much of them."""
    encode_s: float | None = 0.0
    """What that is predicted to take; None if no rows decode that have to wait for it."""


class SettledStep(NamedTuple):
    """A result that was settled in this turn, to be counted."""

    step: InFlightStep
    result: m.StepResult
    was_due: bool
    begin_s: float
    end_s: float
    request_ids: list[int]
    """Requests with a sequence that began or finished with it."""


class InFlightSteps:
    """Owns the steps in flight, their numbering, and the rows that the next step drops."""

    def __init__(self) -> None:
        self.steps: deque[InFlightStep] = deque()
        self.last_step_id = 0
        """The last step that was planned."""
        self._dropped_rows: list[int] = []
        self._renewed_rows: dict[int, None] = {}

    @property
    def last_in_flight(self) -> int | None:
        """The last step in flight, or None. Resources that it may use are released when it is settled."""
        return self.last_step_id if self.steps else None

    def drop_row(self, row: int) -> None:
        """Have the next step tell the executor that a row's sequence has left it."""
        if row in self._renewed_rows:
            del self._renewed_rows[row]  # it is dropped already
        else:
            self._dropped_rows.append(row)

    def renew_row(self, row: int) -> None:
        """Have the next step drop a row and add it again with its new ids and blocks."""
        if row not in self._renewed_rows:
            self._dropped_rows.append(row)
            self._renewed_rows[row] = None

    def renew_all(self, rows: list[int]) -> None:
        """The executor has been replaced by one without rows, and no step is in flight: have the next step add these,
        which are all."""
        assert not self.steps
        self._dropped_rows.clear()
        self._renewed_rows = dict.fromkeys(rows)

    @property
    def renewed_rows(self) -> list[int]:
        """The rows that the next step adds again."""
        return list(self._renewed_rows)

    def take_dropped_rows(self) -> list[int]:
        dropped, self._dropped_rows = self._dropped_rows, []
        self._renewed_rows.clear()
        return dropped

    def lost(self) -> int:
        """The executor has died: forget the steps in flight. Returns the last step that was settled."""
        last_settled = self.steps[0].step_id - 1 if self.steps else self.last_step_id
        self.steps.clear()
        self._dropped_rows.clear()
        self._renewed_rows.clear()
        return last_settled

    def next_step_id(self) -> int:
        self.last_step_id += 1
        return self.last_step_id
