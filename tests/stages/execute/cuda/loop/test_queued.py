"""The GPU computes late: graphs and copies wait in a queue, as in a stream, while the host goes on.

Kernels are interpreted, and elsewhere each launch is computed at once. Here what the host overwrites too early, or
reads before it is there, changes an id.
"""

import os
import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from pipeline.kernels.step_inputs import BLOCK_SIZE
from pipeline.runtime import messages as m
from pipeline.stages.execute.cuda.device import Calls, Interpreted
from pipeline.stages.execute.cuda.runner import CudaRunner
from tests.slices import part_of
from tests.stages.execute.cuda.conftest import on_device
from tests.stages.execute.driver import make_step, row_add, take
from tools.gpu_check.servers.in_flight import FakeMasks

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # numpy, in the interpreter

SEEDS = range(30 if os.environ.get("PIPELINE_ALL_CASES") else 1)
NUM_ROWS, BUDGET, NUM_STEPS, BLOCKS_PER_ROW = 4, 16, part_of(24, 12), 6

WAYS: list[dict[str, Any]] = [
    {},
    {"stop_token_ids": list(range(3, 300, 7))},
    {"temperature": 0.9, "top_k": 40, "min_p": 0.01},
    {"temperature": 0.8, "repetition_penalty": 1.5, "bias_ids": [17], "bias_values": [3.0]},
    {"compiled_grammar": "of FakeMasks"},
    {"compiled_grammar": "of FakeMasks", "temperature": 1.2, "top_p": 0.9},
]


class QueueEvent:
    """A point in the queue."""

    def __init__(self, device: "Queued") -> None:
        self._device, self._position = device, 0

    def record(self) -> None:
        self._position = self._device.num_enqueued

    def synchronize(self) -> None:
        self._device.run_until(self._position)

    def query(self) -> bool:
        self._device.go_on()
        return self._device.num_run >= self._position

    def wait(self) -> None:
        pass

    def elapsed_time(self, later: Any) -> float:
        return 0.0


class Queued(Interpreted):
    """Computes what was enqueued only when the host waits for it, and a bit of it whenever the host asks."""

    captures_graphs = True

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._chance = random.Random(seed)
        self._queue: deque[Callable[[], object]] = deque()
        self.num_enqueued = self.num_run = self.most_waiting = 0
        self.is_serving = False

    def enqueue(self, work: Callable[[], object]) -> None:
        self._queue.append(work)
        self.num_enqueued += 1
        self.most_waiting = max(self.most_waiting, len(self._queue))
        if not self.is_serving:
            self.run_until(self.num_enqueued)

    def run_until(self, position: int) -> None:
        while self._queue and self.num_run < position:
            self._queue.popleft()()
            self.num_run += 1

    def go_on(self) -> None:
        self.run_until(self.num_run + self._chance.choice((0, 0, 1, 2, len(self._queue))))

    def graph(self, calls: Calls) -> Calls:
        assert not self.is_serving, "what a capture does beside its graph is not enqueued"
        return lambda: self.enqueue(calls)

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.enqueue(lambda: target.copy_(source))

    def event(self, *, timed: bool = False) -> Any:
        return QueueEvent(self)

    def synchronize(self) -> None:
        self.run_until(self.num_enqueued)


class OverwritingMasks(FakeMasks):
    """A row's mask depends on its last id. Each request overwrites all masks of the one before."""

    def request(self, rows: Any, ids: Any, num_ids: Any, num_drafts: Any = None) -> Any:
        self.words[:] = 1
        return super().request(rows, ids, num_ids, num_drafts)


def plan(seed: int) -> list[m.Step]:
    """Rows that come, are computed in chunks, decode, and go while steps are in flight. The steps do not depend on the
    sampled ids; rows that have stopped go on in them. Each step computes something: changes alone would be applied by a
    launch of its own, which is not enqueued."""
    chance, steps = random.Random(seed), list[m.Step]()
    rows: dict[int, list[int]] = {}
    """The length of the prompt, the number of computed tokens, and that of all in the end"""
    for number in range(NUM_STEPS):
        drops = [row for row, (_, done, last) in rows.items() if done >= last or chance.random() < 0.05]
        for row in drops:
            del rows[row]
        adds, entries, left = [], [], BUDGET
        for row in range(NUM_ROWS):
            if row not in rows and (chance.random() < 0.6 or not rows):
                prompt = [chance.randrange(3, 250) for _ in range(chance.randint(1, 20))]
                blocks = [row * BLOCKS_PER_ROW + position for position in range(BLOCKS_PER_ROW)]
                options = m.GenerationOptions(seed=number, **{"ignore_eos": True, **chance.choice(WAYS)})
                adds.append(row_add(row, prompt, blocks, options, generation=number + 1))
                rows[row] = [len(prompt), 0, len(prompt) + chance.randint(1, 12)]
        for row, state in rows.items():
            num_prompt, done, _ = state
            count = min(left, max(1, num_prompt - done), chance.choice((5, 20)))
            if count and (chance.random() < 0.9 or not entries):
                state[1] += count
                entries.append((row, done, count, state[1] >= num_prompt))
                left -= count
        steps.append(make_step(entries, adds=adds, drops=drops, step_id=number))
    assert BLOCKS_PER_ROW * BLOCK_SIZE > 20 + 12
    return steps


def run(runner: Any, steps: list[m.Step], depth: int) -> list[Any]:
    found: list[Any] = []
    runner.publish = lambda launched_step, sampled: found.append(
        (sampled.rows.tolist(), sampled.generations.tolist(), sampled.ids.tolist(), sampled.finishes.tolist())
    )
    for step in steps:
        runner.launch(step, take)
        runner.collect_done()
        while len(runner.launched_steps) >= depth:
            runner.collect()
    runner.drain()
    runner.drop_all()
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_steps_in_flight_return_what_each_alone_does(slight_dir: Path, seed: int) -> None:
    device = Queued(seed)
    runner: Any = CudaRunner(on_device(max_num_seqs=NUM_ROWS, tokens=BUDGET), slight_dir, device=device)
    masks: Any = OverwritingMasks(runner.masks.words)
    runner.masks.close()
    runner.masks = runner._changes._masks = masks
    runner._captures._compile = lambda: None  # kernels are interpreted
    runner.capture_graphs()
    while runner.capture_more():
        pass
    steps = plan(seed)
    alone = run(runner, steps, 1)
    device.is_serving, device.most_waiting = True, 0
    together = run(runner, steps, 4)
    runner.close()
    assert together == alone
    assert device.most_waiting > 6, "several steps wait"
    assert len(alone) == len(steps) and sum(len(rows) for rows, *_ in alone) > 20
