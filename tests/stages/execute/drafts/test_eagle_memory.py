"""What an EAGLE proposer keeps of a step does not keep the memory of the whole step."""

from collections.abc import Sequence

import numpy as np

from pipeline.kernels.sampling.logprob_inputs import FloatArray
from pipeline.kernels.step_inputs import IntArray
from pipeline.stages.execute.drafts.eagle import MAX_PENDING, EagleProposer
from pipeline.stages.execute.rows import BoolArray, RowTable


class Proposer(EagleProposer[FloatArray]):
    """Computes nothing."""

    def _run(
        self, rows: IntArray, starts: IntArray, counts: IntArray, hidden: FloatArray, samples: BoolArray
    ) -> tuple[IntArray, FloatArray]:
        assert len(hidden) == counts.sum()
        return np.zeros(0, np.int32), hidden[:0]

    def _states_of(self, residual: FloatArray) -> FloatArray:
        return residual.copy()

    def _join(self, parts: Sequence[FloatArray]) -> FloatArray:
        return np.concatenate(parts)

    def _take(self, states: FloatArray, which: BoolArray) -> FloatArray:
        return states[which]

    def close(self) -> None:
        pass


def test_a_row_beside_a_long_prompt_keeps_its_own_positions_only() -> None:
    proposer = Proposer(RowTable(4, 2048, 200, 100), 2048, 128)
    rows, starts, counts, offsets = np.array([[0, 1], [0, 7], [1000, 1], [0, 1000]], np.int32)
    states = np.arange(2 * 1001, dtype=np.float32).reshape(1001, 2)
    proposer.observe(rows, starts, counts, offsets, states)
    for pending, last in ((proposer._pending[0], 999), (proposer._pending[1], 1000)):
        (part,) = pending.parts
        assert pending.end - pending.start == len(part) <= MAX_PENDING
        owner = part if part.base is None else part.base
        assert owner.size == part.size, "it would keep the states of the prompt"
        assert (part[-1] == states[last]).all()
