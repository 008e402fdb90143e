"""The check of several steps in flight, without a GPU: its plans, and that it sees a wrong result."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline.runtime import messages as m
from pipeline.stages.execute.publishing import Sampled
from tools.gpu_check.servers import in_flight
from tools.gpu_check.servers.in_flight import DEPTH, NUM_BLOCKS, NUM_ROWS, NUM_SWAP_BLOCKS, RandomPlan
from tools.gpu_check.shapes import SMALL

CONTEXT: Any = SimpleNamespace(interpreted=False)


def ints(array: Any) -> list[int]:
    return [int(number) for number in np.frombuffer(array, np.int32)]


def plan(seed: int, num_steps: int = 120) -> tuple[RandomPlan, list[m.Step]]:
    made = RandomPlan(seed, 2048, max_prompt=120, max_output=40)
    return made, [made.step() for _ in range(num_steps)]


def test_a_plan_does_what_a_scheduler_does_and_can_be_repeated() -> None:
    made, steps = plan(0)
    assert plan(0)[1] == steps and plan(1)[1] != steps
    assert all(num > 3 for num in made.done.values()), made.done


@pytest.mark.parametrize("seed", range(4))
def test_plans_are_valid(seed: int) -> None:
    """Rows are taken once, computed in order, and never share a block; a slot is read after it was written."""
    owners: dict[int, int] = {}
    computed: dict[int, int] = {}
    slots: set[int] = set()
    for step in plan(seed)[1]:
        for row in ints(step.drops):
            del computed[row]
            owners = {block: owner for block, owner in owners.items() if owner != row}
        for add in step.adds:
            assert add.row not in computed and 0 <= add.row < NUM_ROWS
            blocks = ints(add.blocks)
            assert not owners.keys() & set(blocks) and max(blocks) < NUM_BLOCKS
            owners |= dict.fromkeys(blocks, add.row)
            computed[add.row] = -1
            assert add.fork_of < 0 or add.fork_of in computed
        written = set()
        for source, target in zip(ints(step.copy_sources), ints(step.copy_targets), strict=True):
            assert source < NUM_BLOCKS or source in slots
            assert target not in written and target < NUM_BLOCKS + NUM_SWAP_BLOCKS
            written.add(target)
            if target >= NUM_BLOCKS:
                slots.add(target)
        for row, start, count in zip(ints(step.rows), ints(step.starts), ints(step.counts), strict=True):
            assert computed[row] in (-1, start) and count > 0
            computed[row] = start + count


class Runner:
    """Samples the number of the step. With `wrong_at`, one step differs if others are in flight."""

    def __init__(self, wrong_at: int = -1) -> None:
        self.launched_steps: deque[Sampled] = deque()
        self._wrong_at, self._num = wrong_at, 0
        self.publish: Any = None

    def launch(self, step: m.Step, take: Any) -> None:
        off = self._num == self._wrong_at and len(self.launched_steps) == DEPTH - 1
        ids = np.array([self._num + off], np.int32)
        self.launched_steps.append(Sampled(ids * 0, ids.astype(np.uint32) * 0, ids, ids.astype(np.uint8) * 0))
        self._num += 1

    def collect(self) -> None:
        self.publish(None, self.launched_steps.popleft())

    def drain(self) -> None:
        while self.launched_steps:
            self.collect()

    def drop_all(self) -> None:
        self._num = 0


def test_a_result_that_differs_with_steps_in_flight_fails() -> None:
    right = in_flight._same("a", Runner(), SMALL, 0, 20, CONTEXT)
    wrong = in_flight._same("a", Runner(wrong_at=7), SMALL, 0, 20, CONTEXT)
    assert right.result == "pass" and wrong.result == "FAIL"
    assert wrong.note.startswith("1 steps differ, the first is 7; ")
