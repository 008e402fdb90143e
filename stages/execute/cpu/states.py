"""The slots for the states of recurrent layers, as steps name them. The program has their memory."""

import numpy as np

from pipeline.kernels.step_inputs import IntArray, StepInputs
from pipeline.runtime.messages import Step
from pipeline.stages.execute.cpu.program import Program
from pipeline.stages.execute.kv import SwapArray, SwapMemory
from pipeline.stages.execute.rows import BoolArray, Take

UNKNOWN = -1
"""Of slots that this process has not written: those in swap space may be of the executor before."""


class StateSlots:
    """Checks that each entry of a step continues the state behind the position before it: one that absorbed a token
    twice would only make other texts."""

    def __init__(self, program: Program, num_slots: int, swapped: SwapMemory | None) -> None:
        self._program, self._num_slots = program, num_slots
        self._swapped: SwapArray = np.zeros((0, 0), np.uint8) if swapped is None else swapped.slots
        self._positions: IntArray = np.full(num_slots + len(self._swapped), UNKNOWN, np.int32)
        """By slot, those of swap space last: the number of tokens that its state has absorbed."""
        self.checks = True
        """Not in a replay: a recording that began late lacks what was written before."""

    def copy(self, step: Step, take: Take) -> None:
        """Make the step's copies."""
        sources, targets = take(step.state_copy_sources, np.int32), take(step.state_copy_targets, np.int32)
        assert len(sources) == len(targets), f"{len(sources)} source slots, {len(targets)} target slots"
        if not len(sources):
            return
        in_swap = np.stack([sources, targets]) >= self._num_slots
        assert (in_swap[0] != in_swap[1]).all(), "a slot is copied within one memory"
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self._positions[target] = self._positions[source]
        self._program.copy_states(self._swapped, sources, targets)

    def fill(
        self, inputs: StepInputs, step: Step, take: Take, starts: IntArray, counts: IntArray, ended: BoolArray
    ) -> None:
        """Set the slots of the step's entries but those of rows that have `ended`."""
        reads, writes = take(step.state_reads, np.int32), take(step.state_writes, np.int32)
        assert len(reads) == len(writes) == len(ended), f"{len(reads)} states for {len(ended)} entries"
        running = ~ended
        reads, writes, starts, counts = reads[running], writes[running], starts[running], counts[running]
        found = np.where(reads < 0, 0, self._positions[reads])
        assert not self.checks or ((found == starts) | (found == UNKNOWN)).all(), (
            f"states at {found}, entries at {starts}"
        )
        assert len(np.unique(writes)) == len(writes) and not (writes >= self._num_slots).any(), f"writes {writes}"
        self._positions[writes] = starts + counts
        inputs.state_reads[: len(reads)], inputs.state_writes[: len(writes)] = reads, writes
