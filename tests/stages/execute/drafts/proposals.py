"""What a proposer proposes while a runner serves requests."""

from collections.abc import Callable

import numpy as np
import pytest

from pipeline.kernels.step_inputs import IntArray
from pipeline.stages.execute.cpu.native.program import NativeProgram
from pipeline.stages.execute.cpu.runner import CpuRunner
from tests.stages.execute.pair import Pair, Request

Proposal = tuple[list[int], list[int]]
"""The ids that a row had, and those that were proposed for it."""


def proposals(
    runner: CpuRunner, kind: type, requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> list[Proposal]:
    """Run the requests, whose prompts are read in chunks, and return each proposal of the proposer of this kind."""
    assert runner.speculator is not None
    proposer = runner.speculator.proposer
    assert isinstance(proposer, kind)
    found: list[Proposal] = []
    propose = proposer.propose

    def noting(rows: IntArray, most: IntArray, clock: Callable[[], float]) -> list[IntArray]:
        proposed = propose(rows, most, clock)
        for row, ids in zip(rows.tolist(), proposed, strict=True):
            found.append((runner.rows.ids[row, : runner.rows.num_ids[row]].tolist(), ids.tolist()))
        return proposed

    monkeypatch.setattr(proposer, "propose", noting)
    Pair(runner, adaptive_speculation=False, prefix_caching=False, max_num_batched_tokens=48).run(requests)
    return found


def expect_formula(runner: CpuRunner, found: list[Proposal], by_formula: Callable[[list[int], int], list[int]]) -> None:
    """Compare each proposal with the one that `by_formula` computes from the same ids."""
    right = [ids == by_formula(known, len(ids)) for known, ids in found]
    if isinstance(runner.program, NativeProgram):  # where logits are nearly equal, bfloat16 decides otherwise
        assert np.mean(right) > 0.6
    else:
        assert all(right)
