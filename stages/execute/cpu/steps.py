"""The steps of a CPU, for the loop: a step is computed when it is launched."""

from typing import NamedTuple

from pipeline.runtime import messages as m
from pipeline.runtime.stage import Stage
from pipeline.stages.execute.cpu.runner import CpuRunner
from pipeline.stages.execute.publishing import Publisher, Sampled, StepTiming


class ComputedStep(NamedTuple):
    step: m.Step
    sampled: Sampled
    times: StepTiming


class CpuSteps:
    """`Steps` of stages/execute/loop.py. Between a launch and the next `collect` there is one step, which is over."""

    prepare_more = None
    oldest_s = None

    def __init__(self, stage: "Stage[m.ExecuteInbox]", publisher: Publisher, runner: CpuRunner) -> None:
        self._stage, self._publisher, self._runner = stage, publisher, runner
        self._schedule = stage.outbox("schedule")
        self._computed: ComputedStep | None = None
        self._idle_since_s = stage.replay_context.monotonic()

    def launch(self, step: m.Step) -> None:
        """Compute the step."""
        stage = self._stage
        began_s = stage.replay_context.monotonic()
        sampled = self._runner.step(step, stage.arrays.take, stage.replay_context.monotonic)
        if self._runner.answers and self._runner.generates:
            self._schedule.wake()  # it wakes while the result is packed; texts of an encoder are not in such a hurry
        ended_s = stage.replay_context.monotonic()
        times = StepTiming(began_s, ended_s, began_s - self._idle_since_s)
        self._computed, self._idle_since_s = ComputedStep(step, sampled, times), ended_s

    def collect(self, *, waits: bool = False) -> bool:
        """Publish the step."""
        if self._computed is None:
            return False
        (step, sampled, times), self._computed = self._computed, None
        requests = [add.request_id for add in step.adds] if self._stage.trace.on else []
        self._publisher.publish(step.incarnation, step.step_id, sampled, times, requests)
        return True

    def close(self) -> None:
        """There is nothing to free."""
