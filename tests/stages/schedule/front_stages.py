"""Fakes of the stages of a pipeline before the last one: they store ids in KV blocks, but sample none, and learn of a
step's ids only when the last stage has computed it."""

from collections import deque

import numpy as np

from pipeline.runtime import messages as m
from pipeline.runtime.messages import Finish
from pipeline.stages.schedule.scheduler_config import SchedulerConfig
from tests.fakes import FakeExecutor, _Row, inline


class FrontStage(FakeExecutor):
    """Computes a step as early as it may, and fails if it lacks an id for it."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(
            config.num_blocks,
            num_swap_blocks=config.num_swap_blocks,
            groups=config.kv_groups,
            num_state_slots=config.states.num_slots,
            num_swap_state_slots=config.states.num_swap_slots,
            num_encoder_rows=config.num_encoder_rows,
        )
        self._promised: list[tuple[_Row, int]] = []

    def compute(self, step: m.Step) -> list[tuple[_Row, int]]:
        """Compute a step. Returns the rows that get an id, and its place in each."""
        self._promised = []
        self.run(step)
        return self._promised

    def _sample(self, row: int, length: int, proposed: list[int]) -> tuple[list[int], Finish, str]:
        self._promised.append((self.rows[row], length))
        return [], Finish.NONE, ""


class FrontStages:
    """All of them, for a bench. Steps come in order, and so do their results."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._num_stages = config.num_stages
        self.stages = [FrontStage(config) for _ in range(config.num_stages - 1)]
        self._steps: deque[m.Step] = deque()
        self._promises: deque[tuple[int, list[tuple[_Row, int]]]] = deque()
        self._results: dict[int, m.StepResult] = {}
        self._last_result = 0

    def take(self, step: m.Step) -> None:
        """A step was planned."""
        if self.stages:
            if not (self._steps or self._promises or self._results):
                self._last_result = step.step_id - 1
            self._steps.append(step)
            self._go_on()

    def computed(self, result: m.StepResult) -> None:
        """The last stage has computed a step."""
        if self.stages:
            self._results[result.step_id] = result
            self._last_result = result.step_id
            self._go_on()

    def _go_on(self) -> None:
        while True:
            while self._promises and self._promises[0][0] in self._results:
                number, promised = self._promises.popleft()
                self._learn(promised, self._results.pop(number))
            if not self._steps or self._steps[0].step_id - self._num_stages > self._last_result:
                return
            step = self._steps.popleft()
            promised = [one for stage in self.stages for one in stage.compute(step)]
            self._promises.append((step.step_id, promised))

    def _learn(self, promised: list[tuple[_Row, int]], result: m.StepResult) -> None:
        ids = np.frombuffer(inline(result.ids), np.int32).tolist()
        finishes = np.frombuffer(inline(result.finishes), np.uint8).tolist()
        assert len(promised) == len(ids) * len(self.stages)
        for (row, length), token_id, finish in zip(
            promised, ids * len(self.stages), finishes * len(self.stages), strict=True
        ):
            if token_id >= 0:
                row.ids[length] = token_id
            row.dead = row.dead or finish != Finish.NONE

    def successors(self, config: SchedulerConfig, *, keeps_kv: bool) -> "FrontStages":
        """The same stages without rows, or their successors, which have nothing but the swap space."""
        successors = FrontStages(config)
        for ours, theirs in zip(successors.stages, self.stages, strict=True):
            begin = 0 if keeps_kv else ours.num_blocks
            ours.kv[begin:] = theirs.kv[begin:]
            begin = 0 if keeps_kv else ours.num_state_slots
            ours.states[begin:] = theirs.states[begin:]
        return successors
