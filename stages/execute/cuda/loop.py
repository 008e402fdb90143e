"""The executor's loop on a GPU: launches steps that arrive, publishes steps that are over, waits for either.

    step ──► launched ──► over ──► published        in the order of the steps

If both are possible, it publishes a result before it launches the next step, because the scheduler waits for it.
"""

import struct
import time
from typing import assert_never

from pipeline.runtime import messages as m
from pipeline.runtime.stage import Stage
from pipeline.stages.execute.adapters.reports import AdapterReports
from pipeline.stages.execute.cuda.completions import Completions
from pipeline.stages.execute.cuda.launched_step import LaunchedStep
from pipeline.stages.execute.cuda.runner import CudaRunner
from pipeline.stages.execute.metrics import ExecuteMetrics
from pipeline.stages.execute.publishing import Publisher, StepTiming
from pipeline.stages.execute.ranks.place import StepAbandonedError
from pipeline.stages.execute.runner import Sampled

IDLE_S = 1.0
"""Longest wait in an iteration of the loop."""
PAUSE_S = 0.2
"""After this time without a message or a result, the loop captures graphs that no step has used yet, one by one, until
a message arrives. It is longer than the pause between a result and the next step."""
STUCK_S = 60.0
"""After this time with a step in flight, pings are not answered, so that `/health` reports a GPU that hangs."""

TIMES = struct.Struct("<dddddd")
"""Times of a step in a recording, in seconds: when it was seen to be over, compute, wait, copy, a draft model's
proposals and one of its passes."""


def serve(stage: "Stage[m.ExecuteInbox]", runner: CudaRunner) -> None:
    """Compute steps until `Stop`. Errors of a step propagate, also the GPU's."""
    completions = Completions()
    try:
        Loop(stage, runner, completions).run()
    finally:
        completions.close()


class Loop:
    """The state of the loop."""

    def __init__(self, stage: "Stage[m.ExecuteInbox]", runner: CudaRunner, completions: Completions) -> None:
        self._stage, self._runner, self._completions = stage, runner, completions
        ranks = runner.ranks
        self._metrics = ExecuteMetrics() if ranks is None else ExecuteMetrics(lambda: ranks.board.waited_s)
        stage.control_requests.own_counts = lambda: self._metrics.counts(runner.rows.num_live)
        self._publisher = Publisher(stage, self._metrics, answers=not stage.replica)
        self._reports = AdapterReports(stage, runner.adapters)
        runner.publish = self._publish
        self._ended_ns = 0
        """When the last step ended, by the GPU's clock."""
        self._launched: dict[int, tuple[float, list[int]]] = {}
        """By step id: the time of its launch, by the stage's clock, and the requests that start with it."""
        self._ended_s = stage.replay_context.monotonic()
        if stage.inbox.is_replayed:
            stage.replay_context.perform("complete", lambda key, data: self._collect_again(key))
        else:
            stage.inbox.wake_by(completions.fd)

    def run(self) -> None:
        stage, runner = self._stage, self._runner
        captures_more = not stage.inbox.is_replayed
        timeout_s, busy_s = PAUSE_S, time.monotonic()
        while True:
            messages = stage.inbox.wait_all(timeout_s if captures_more else IDLE_S)
            if runner.ranks is not None:
                runner.ranks.check(self._oldest_launched_s())
            has_collected = self._collect()
            self._reports.poll()
            for message in messages:
                match message:
                    case m.Step():
                        self._launch(message)
                        self._collect()
                    case m.Release():
                        stage.arrays.released(message)
                    case m.PeerRestarted():  # schedule: its successor begins without rows
                        self._collect(waits=True)
                        runner.drop_all(message.incarnation)
                        self._reports.forget()
                        stage.reconnected(message)
                    case m.Ping():
                        if not self._is_stuck():
                            stage.supervisor.send(m.Pong(message.nonce, self._metrics.load(runner.rows.num_live)))
                    case m.Adapters(adapters):
                        runner.preload_adapters([one.id for one in adapters])
                    case m.UseAdapters():
                        self._reports.use(message)
                    case m.Start():
                        runner.masks.start()
                    case m.Stop():
                        self._collect(waits=True)
                        return
                    case _:
                        assert_never(message)
            stage.release()
            if messages or has_collected or runner.launched_steps:
                timeout_s, busy_s = PAUSE_S, time.monotonic()
            elif captures_more and time.monotonic() - busy_s >= PAUSE_S:
                captures_more, timeout_s = runner.capture_more(), 0.0

    def _launch(self, step: m.Step) -> None:
        began_s = self._stage.replay_context.monotonic()
        self._launched[step.step_id] = began_s, [add.request_id for add in step.adds]
        try:
            self._completions.put(self._runner.launch(step, self._stage.arrays.take))
        except StepAbandonedError:  # `PeerRestarted` follows
            del self._launched[step.step_id]

    def _oldest_launched_s(self) -> float | None:
        launched_steps = self._runner.launched_steps
        return self._launched[launched_steps[0].step_id][0] if launched_steps else None

    def _is_stuck(self) -> bool:
        if self._stage.inbox.is_replayed or not self._runner.launched_steps:
            return False
        launched_s, _ = self._launched[self._runner.launched_steps[0].step_id]
        return time.monotonic() - launched_s > STUCK_S

    def _collect(self, *, waits: bool = False) -> bool:
        """Publish the steps that are over or, with `waits`, all; in a replay, those that were published then.

        Returns whether there was any.
        """
        if self._stage.inbox.is_replayed:
            self._stage.replay_context.catch_up()
            return False
        self._completions.clear()
        return bool(self._runner.drain() if waits else self._runner.collect_done())

    def _collect_again(self, step_id: int) -> None:
        # A recording that began later has results of steps that it does not have.
        launched_steps = self._runner.launched_steps
        if launched_steps and launched_steps[0].step_id == step_id:
            self._runner.collect()

    def _publish(self, launched_step: LaunchedStep, sampled: Sampled) -> None:
        stage = self._stage
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
            stage.replay_context.observe("complete", launched_step.step_id, times)
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
