"""What a step computes, as the scheduler puts it together, and what it remembers of a step that is in flight."""

from typing import NamedTuple

import msgspec
import numpy as np

from pipeline.stages.schedule.arrays import Bools, Int64s
from pipeline.stages.schedule.policies.budget import StepShape
from pipeline.stages.schedule.request import Sequence


class ExpectedPromptLogprobs(msgspec.Struct, frozen=True):
    """Records that a step tells of a prompt's ids."""

    row: int
    sequence: Sequence
    start: int
    """Records before these"""
    num: int
    width: int


class ExpectedLogprobs(msgspec.Struct, frozen=True):
    """What a step in flight will tell."""

    widths: Int64s
    """Bytes of the record of each of its samples; 0 for those that have none"""
    prompts: list[ExpectedPromptLogprobs]


class InFlightStep(msgspec.Struct, frozen=True):
    """A step that the executor has been sent and has not answered."""

    step_id: int
    num_samples: int
    num_tokens: int
    num_copies: int
    """To and from swap space; 0 where there are others too"""
    shape: StepShape | None
    """Where its time is to be learnt from"""
    awaited: ExpectedLogprobs | None = None
    """What it tells of ids besides"""


class StepEntries(NamedTuple):
    """Rows that a step computes; parallel arrays."""

    rows: Int64s
    starts: Int64s
    counts: Int64s
    samples: Bools

    def taken(self, places: Int64s) -> "StepEntries":
        """Those at these places, in their order."""
        return StepEntries(self.rows[places], self.starts[places], self.counts[places], self.samples[places])


def joined(entries: list[StepEntries]) -> StepEntries:
    """All of them, one behind the other."""
    if len(entries) == 1:
        return entries[0]
    return StepEntries(*(np.concatenate(arrays) for arrays in zip(*entries, strict=True)))
