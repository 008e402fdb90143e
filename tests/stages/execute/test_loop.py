"""The executor's loop on a CPU, with a runner that computes nothing. On a GPU: cuda/test_loop_alone.py."""

from functools import partial
from types import SimpleNamespace
from typing import Any

from pipeline.runtime import messages as m
from pipeline.runtime.replay_context import ReplayContext
from pipeline.stages.execute.cpu.steps import CpuSteps
from pipeline.stages.execute.loop import IDLE_S, serve
from pipeline.stages.execute.publishing import Sampled
from pipeline.stages.execute.ranks.context import StepAbandonedError
from tests.stages.execute.driver import make_step
from tests.stages.execute.loop_driver import INTS, ScriptedInbox, stage_of

ABANDONED = 99


class EventRunner:
    """Replaces `CpuRunner`, and records what the loop calls."""

    def __init__(self, *, answers: bool = True, generates: bool = True) -> None:
        self.events: list[str] = []
        self.answers, self.generates, self.rank_name, self.adapters = answers, generates, "", None
        self.rows = SimpleNamespace(num_live=0)
        self.slow_masks: dict[int, float] | None = None
        self.masks = SimpleNamespace(take_slow=lambda: self.slow_masks)
        self.num_over = self.num_captured = 0

    def step(self, step: m.Step, take: Any, clock: Any) -> Sampled:
        self.events.append(f"compute {step.step_id}")
        if step.step_id == ABANDONED:
            raise StepAbandonedError
        return Sampled(INTS, INTS.astype("u4"), INTS, INTS.astype("u1"))

    def drop_all(self, incarnation: int) -> None:
        self.events.append(f"drop all rows for {incarnation}")

    def start(self) -> None:
        self.events.append("start")

    def barrier_wait_s(self) -> float:
        return 0.0

    pipeline_wait_s = barrier_wait_s


def events_of(runner: EventRunner, *wakes: list[Any], after_s: float = 0.0) -> tuple[list[str], ScriptedInbox]:
    """What the loop calls and sends in these wakes."""
    inbox = ScriptedInbox(runner, [(after_s, wake, 0) for wake in (*wakes, [m.Stop()])])
    stage, _ = stage_of(inbox, ReplayContext())

    def send(message: Any) -> bool:
        slow = dict(zip(message.slow_rows, message.slow_s, strict=True))
        runner.events.append(f"result {message.step_id}" + (f" {slow}" if slow else ""))
        return True

    outbox = SimpleNamespace(send=send, wake=lambda: runner.events.append("wake"))
    stage.outbox = lambda peer: outbox
    stage.supervisor = SimpleNamespace(send=lambda pong: runner.events.append(f"pong {pong.nonce}"))
    stage.reconnected = lambda message: runner.events.append("reconnected")
    stage.release = lambda: runner.events.append("|")
    serve(stage, runner, partial(CpuSteps, runner=runner))  # type: ignore[arg-type]
    return runner.events, inbox


def test_each_result_is_sent_before_the_next_message_is_handled() -> None:
    steps = [make_step(step_id=step_id) for step_id in (1, 2, 3)]
    events, _ = events_of(
        EventRunner(), [m.Start(m.ExecuteFacts(1, 16, 16, 300))], [steps[0], m.Ping(5), steps[1]], [steps[2]]
    )
    expected = "start, |, compute 1, wake, result 1, pong 5, compute 2, wake, result 2, |, compute 3, wake, result 3, |"
    assert events == expected.split(", ")


def test_a_result_has_the_rows_whose_masks_were_slow() -> None:
    runner = EventRunner(generates=False)
    runner.slow_masks = {3: 0.5}
    events, _ = events_of(runner, [make_step(step_id=1)])
    assert events == ["compute 1", "result 1 {3: 0.5}", "|"]


def test_the_scheduler_is_not_woken_early_for_texts_of_an_encoder() -> None:
    events, _ = events_of(EventRunner(generates=False), [make_step(step_id=1)])
    assert events == ["compute 1", "result 1", "|"]


def test_a_step_of_a_dead_schedule_has_no_result() -> None:
    restarted = m.PeerRestarted(7, m.PeerInbox("schedule.0", "", 1), 3, [])
    events, _ = events_of(EventRunner(), [make_step(step_id=ABANDONED), restarted, make_step(step_id=1)])
    expected = "compute 99, drop all rows for 3, reconnected, compute 1, wake, result 1, |"
    assert events == expected.split(", ")


def test_of_several_ranks_one_wakes_the_scheduler_and_answers() -> None:
    events, _ = events_of(EventRunner(answers=False), [make_step(step_id=1)])
    assert events == ["compute 1", "|"]


def test_a_cpu_prepares_nothing_in_pauses() -> None:
    """So the loop does not wake for that."""
    _, inbox = events_of(EventRunner(), [], [make_step(step_id=1)], [], after_s=10 * IDLE_S)
    assert inbox.now_s == 100 + 4 * IDLE_S
