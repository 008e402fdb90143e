"""The executor's loop, on any device: handles messages in order, and publishes each step's result when it is over.

    step ──► launched ──► over ──► published        in the order of the steps

On a GPU, several steps are in flight: the next one is launched before the one before is over. If both are possible, a
result is published before the next step is launched, because the scheduler waits for it. A CPU has computed a step when
its launch returns.

The shared memory of steps is released once per turn, with the results: the scheduler is awake then, and no core is
taken from a running step.
"""

import time
from collections.abc import Callable
from typing import Protocol, assert_never

from pipeline.runtime import messages as m
from pipeline.runtime.stage import Stage
from pipeline.stages.execute.adapters.reports import AdapterReports
from pipeline.stages.execute.metrics import ExecuteMetrics
from pipeline.stages.execute.publishing import Publisher
from pipeline.stages.execute.ranks.context import StepAbandonedError
from pipeline.stages.execute.runner import Runner

IDLE_S = 1.0
"""Longest wait in an iteration of the loop."""
PAUSE_S = 0.2
"""After this time without a message or a result, the loop lets the back end prepare what no step has used yet, piece by
piece, until a message arrives. It is longer than the pause between a result and the next step."""
STUCK_S = 60.0
"""After this time with a step in flight, pings are not answered, so that `/health` reports a GPU that hangs."""


class Steps(Protocol):
    """The steps of a back end that have been launched and not been published."""

    @property
    def prepare_more(self) -> Callable[[], bool] | None:
        """Prepares one more thing for later steps, and returns False if nothing is left. None if there is nothing to
        prepare."""

    @property
    def oldest_s(self) -> float | None:
        """When the oldest step in flight was launched, by the stage's clock; None if there is none."""

    def launch(self, step: m.Step) -> None:
        """Begin to compute a step. If it needs results of steps in flight, this waits for them and publishes them.
        Raises StepAbandonedError if not all ranks may have got the step: then nothing has changed."""

    def collect(self, *, waits: bool = False) -> bool:
        """Publish the steps that are over or, with `waits`, all, in order. Returns whether there was any. In a replay,
        publish those that were published then."""

    def close(self) -> None:
        """Free what belongs to the steps."""


MakeSteps = Callable[["Stage[m.ExecuteInbox]", Publisher], Steps]


def serve(stage: "Stage[m.ExecuteInbox]", runner: Runner, make_steps: MakeSteps) -> None:
    """Compute steps until `Stop`. Errors of a step propagate, also a GPU's."""
    loop = Loop(stage, runner, make_steps)
    try:
        loop.run()
    finally:
        loop.close()


class Loop:
    """The state of the loop."""

    def __init__(self, stage: "Stage[m.ExecuteInbox]", runner: Runner, make_steps: MakeSteps) -> None:
        self._stage, self._runner = stage, runner
        self._metrics = ExecuteMetrics(runner.barrier_wait_s, runner.pipeline_wait_s, runner.rank_name)
        stage.control_requests.own_counts = lambda: self._metrics.counts(runner.rows.num_live)
        self._reports = AdapterReports(stage, runner.adapters)
        self._steps = make_steps(stage, Publisher(stage, self._metrics, runner.masks.take_slow, answers=runner.answers))

    def run(self) -> None:
        """Handle messages until `Stop`."""
        stage, steps = self._stage, self._steps
        pauses = Pauses(None if stage.inbox.is_replayed else steps.prepare_more)
        while True:
            messages = stage.inbox.wait_all(pauses.timeout_s)
            has_collected = steps.collect()
            self._reports.poll()
            for message in messages:
                if isinstance(message, m.Stop):
                    steps.collect(waits=True)
                    return
                self._handle(message)
            stage.release()
            pauses.turn(bool(messages) or has_collected or steps.oldest_s is not None)

    def close(self) -> None:
        self._steps.close()

    def _handle(self, message: m.ExecuteInbox) -> None:
        stage, runner, steps = self._stage, self._runner, self._steps
        match message:
            case m.Step():
                try:
                    steps.launch(message)
                except StepAbandonedError:
                    return  # `PeerRestarted` follows
                steps.collect()
            case m.Release():
                stage.arrays.released(message)
            case m.PeerRestarted():  # schedule: its successor begins without rows
                steps.collect(waits=True)
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
            case m.SaveKV():
                steps.collect(waits=True)
                stage.supervisor.send(runner.save_kv(message, stage.arrays.take))
            case m.ExpectGrammars():
                runner.expect_grammars()
            case m.Start():
                runner.start()
            case m.Stop():
                pass  # ends the loop
            case _:
                assert_never(message)

    def _is_stuck(self) -> bool:
        oldest_s = self._steps.oldest_s
        return oldest_s is not None and not self._stage.inbox.is_replayed and time.monotonic() - oldest_s > STUCK_S


class Pauses:
    """What the back end prepares while there is nothing else to do."""

    def __init__(self, prepare_more: Callable[[], bool] | None) -> None:
        self._prepare_more = prepare_more
        self._busy_s = time.monotonic()
        self.timeout_s = IDLE_S if prepare_more is None else PAUSE_S
        """How long the loop may wait for a message."""

    def turn(self, is_busy: bool) -> None:
        """The end of an iteration of the loop, in which it was busy or not."""
        if self._prepare_more is None:
            return
        if is_busy:
            self.timeout_s, self._busy_s = PAUSE_S, time.monotonic()
        elif time.monotonic() - self._busy_s >= PAUSE_S:
            if self._prepare_more():
                self.timeout_s = 0.0
            else:
                self._prepare_more, self.timeout_s = None, IDLE_S
