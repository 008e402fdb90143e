"""The steps of a GPU, for the loop: which are in flight, and when their results are published."""

import struct
import time

from pipeline.runtime import messages as m
from pipeline.runtime.stage import Stage
from pipeline.stages.execute.cuda.completions import Completions
from pipeline.stages.execute.cuda.launched_step import LaunchedStep
from pipeline.stages.execute.cuda.runner import CudaRunner
from pipeline.stages.execute.publishing import Publisher, Sampled, StepTiming
from pipeline.stages.execute.ranks.context import StepAbandonedError

TIMES = struct.Struct("<dddddd")
"""Times of a step in a recording, in seconds: when it was seen to be over, compute, wait, copy, a draft model's
proposals and one of its passes."""


class CudaSteps:
    """`Steps` of stages/execute/loop.py. Owns the thread that wakes the loop when a step is over."""

    def __init__(self, stage: "Stage[m.ExecuteInbox]", publisher: Publisher, runner: CudaRunner) -> None:
        self._stage, self._publisher, self._runner = stage, publisher, runner
        self._completions = Completions()
        self.prepare_more = runner.capture_more
        runner.publish = self._publish
        self._ended_ns = 0
        """When the last step ended, by the GPU's clock."""
        self._launched: dict[int, tuple[float, list[int]]] = {}
        """By step id: the time of its launch, by the stage's clock, and the requests that start with it."""
        self._ended_s = stage.replay_context.monotonic()
        if stage.inbox.is_replayed:
            stage.replay_context.perform("complete", lambda key, data: self._collect_again(key))
        else:
            stage.inbox.wake_by(self._completions.fd)

    @property
    def oldest_s(self) -> float | None:
        """When the oldest step in flight was launched, by the stage's clock; None if there is none."""
        launched_steps = self._runner.launched_steps
        return self._launched[launched_steps[0].step_id][0] if launched_steps else None

    def launch(self, step: m.Step) -> None:
        """Launch the step. If it needs grammar masks or proposes ids, the steps before it are published first."""
        began_s = self._stage.replay_context.monotonic()
        self._launched[step.step_id] = began_s, [add.request_id for add in step.adds]
        try:
            self._completions.put(self._runner.launch(step, self._stage.arrays.take))
        except StepAbandonedError:
            del self._launched[step.step_id]
            raise

    def collect(self, *, waits: bool = False) -> bool:
        """Publish the steps that are over or, with `waits`, all; in a replay, those that were published then. Returns
        whether there was any. Raises RankLateError if the oldest one doesn't end."""
        if self._runner.ranks is not None:
            self._runner.ranks.check(self.oldest_s)
        if self._stage.inbox.is_replayed:
            self._stage.replay_context.catch_up()
            return False
        self._completions.clear()
        return bool(self._runner.drain() if waits else self._runner.collect_done())

    def close(self) -> None:
        """End the thread."""
        self._completions.close()

    def _collect_again(self, step_id: int) -> None:
        # A recording that began later has results of steps that it does not have.
        launched_steps = self._runner.launched_steps
        if launched_steps and launched_steps[0].step_id == step_id:
            self._runner.collect()

    def _publish(self, launched_step: LaunchedStep, sampled: Sampled) -> None:
        launched_s, requests = self._launched.pop(launched_step.step_id)
        now_s = time.monotonic()
        if launched_step.end_ns:
            compute_s, wait_s = seconds_of(launched_step, self._ended_ns, sampled.copy_s)
            self._ended_ns = launched_step.end_ns
        else:
            # No GPU clock, or nothing computed.
            compute_s, wait_s = now_s - max(launched_s, self._ended_s), max(0.0, launched_s - self._ended_s)
            compute_s -= sampled.draft_s
        times = TIMES.pack(now_s, compute_s, wait_s, sampled.copy_s, sampled.draft_s, sampled.draft_pass_s)
        now_s, compute_s, wait_s, copy_s, draft_s, pass_s = TIMES.unpack(
            self._stage.replay_context.observe("complete", launched_step.step_id, times)
        )
        self._ended_s = now_s
        if (copy_s, draft_s) != (sampled.copy_s, sampled.draft_s):
            sampled = sampled._replace(copy_s=copy_s, draft_s=draft_s, draft_pass_s=pass_s)
        compute_s += draft_s  # the GPU's clock does not see it
        self._publisher.publish(
            launched_step.incarnation,
            launched_step.step_id,
            sampled,
            StepTiming(now_s - compute_s, now_s, wait_s),
            requests,
        )


def seconds_of(launched_step: LaunchedStep, ended_ns: int, copy_s: float) -> tuple[float, float]:
    """The step's compute time and the GPU's idle time before it, by the GPU's clock.

    `ended_ns` is the end of the previous step, 0 if there is none. The compute time includes copies over the bus, which
    the clock does not see.
    """
    compute_s = (launched_step.end_ns - launched_step.start_ns) / 1e9 + copy_s
    wait_s = max(0.0, (launched_step.start_ns - ended_ns) / 1e9 - copy_s) if ended_ns else 0.0
    return compute_s, wait_s
