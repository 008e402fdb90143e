"""The executor's loop on a GPU without a GPU: a runner that computes nothing, and steps that end when a test
decides."""

from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.config.settings import Settings
from pipeline.replay import format as f
from pipeline.replay.player import PlaybackContext
from pipeline.replay.replay_channels import ReplayInbox
from pipeline.runtime import messages as m
from pipeline.runtime.replay_context import ReplayContext
from pipeline.stages.execute import loop
from pipeline.stages.execute.cuda import steps
from pipeline.stages.execute.cuda.launched_step import LaunchedStep
from pipeline.stages.execute.cuda.steps import TIMES, CudaSteps
from pipeline.stages.execute.loop import PAUSE_S, serve
from pipeline.stages.execute.publishing import Sampled
from pipeline.stages.execute.ranks.context import StepAbandonedError
from tests.stages.execute.driver import make_step, row_add
from tests.stages.execute.loop_driver import INTS, ScriptedInbox, stage_of

NONE: Any = None


class IdleRunner:
    """Replaces `CudaRunner`."""

    def __init__(self) -> None:
        self.launched_steps: deque[LaunchedStep] = deque()
        self.rows = SimpleNamespace(num_live=0)
        self.masks = SimpleNamespace(take_slow=lambda: None)
        self.num_over = self.num_captured = 0
        self.ranks = self.adapters = None
        self.answers, self.rank_name = True, ""
        self.publish: Callable[[LaunchedStep, Sampled], None] = lambda launched_step, sampled: None

    def launch(self, step: m.Step, take: Any) -> LaunchedStep:
        self.launched_steps.append(LaunchedStep(1, step.step_id, NONE, 0, *(NONE,) * 4, num_rows=0, num_tokens=0))
        self.launched_steps[-1].is_collected = True  # no one waits for it
        return self.launched_steps[-1]

    def collect(self) -> Sampled:
        sampled = Sampled(INTS, INTS.astype(np.uint32), INTS, INTS.astype(np.uint8))
        self.publish(self.launched_steps.popleft(), sampled)
        return sampled

    def collect_done(self) -> list[Sampled]:
        num = min(self.num_over, len(self.launched_steps))
        self.num_over -= num
        return [self.collect() for _ in range(num)]

    def drain(self) -> list[Sampled]:
        return [self.collect() for _ in range(len(self.launched_steps))]

    def barrier_wait_s(self) -> float:
        return 0.0

    pipeline_wait_s = barrier_wait_s

    def capture_more(self) -> bool:
        self.num_captured += 1
        return True


def run(stage: Any, runner: Any) -> None:
    serve(stage, runner, partial(CudaSteps, runner=runner))


def test_graphs_are_captured_when_the_executor_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not between a result and the next step."""
    runner = IdleRunner()
    step, late = make_step(step_id=1), 2 * PAUSE_S
    wakes: list[tuple[float, list[Any], int]] = [
        (0.001, [step], 0),
        (0.001, [], 1),  # woken by its end
        (0.0001, [], 0),  # woken by the thread, which is late
        (0.001, [step], 0),
        (late, [], 0),  # a long step
        (0.001, [], 1),
        (late, [], 0),
        (late, [], 0),
        (0.001, [step], 1),
        (0.001, [m.Stop()], 0),
    ]
    inbox = ScriptedInbox(runner, wakes)
    for module in (loop, steps):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: inbox.now_s))
    stage, sent = stage_of(inbox, ReplayContext())
    run(stage, runner)
    assert inbox.num_captured == [0, 0, 0, 0, 0, 0, 0, 1, 2, 2]
    assert inbox.now_s == pytest.approx(100 + 0.0051 + 2 * PAUSE_S), "one after the other, without another pause"
    assert len(sent) == 3


def test_the_pause_begins_when_a_result_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = IdleRunner()
    wakes: list[tuple[float, list[Any], int]] = [
        (0.0, [make_step(step_id=1)], 0),
        (0.8 * PAUSE_S, [], 1),
        (0.8 * PAUSE_S, [], 0),
        (0.8 * PAUSE_S, [], 0),
        (0.0, [m.Stop()], 0),
    ]
    inbox = ScriptedInbox(runner, wakes)
    for module in (loop, steps):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: inbox.now_s))
    stage, _ = stage_of(inbox, ReplayContext())
    run(stage, runner)
    assert inbox.num_captured == [0, 0, 0, 0, 1]


def test_pings_are_answered_during_a_step_unless_it_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = IdleRunner()
    wakes: list[tuple[float, list[Any], int]] = [
        (0.0, [make_step(step_id=1), m.Ping(1)], 0),
        *((1.0, [m.Ping(2)], 0) for _ in range(59)),
        *((1.0, [], 0) for _ in range(700)),
        (0.0, [m.Ping(3)], 0),
        (0.0, [], 1),
        (0.0, [m.Ping(4), m.Stop()], 0),
    ]
    inbox = ScriptedInbox(runner, wakes)
    replay_context = ReplayContext()
    monkeypatch.setattr(replay_context, "monotonic", lambda: inbox.now_s)
    for module in (loop, steps):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: inbox.now_s))
    stage, _ = stage_of(inbox, replay_context)
    pongs: list[int] = []
    stage.supervisor = SimpleNamespace(send=lambda pong: pongs.append(pong.nonce))
    run(stage, runner)
    assert pongs == [1, *[2] * 59, 4]


class EventRunner(IdleRunner):
    """Records what the loop calls. The oldest step is over when the step `over_in` is launched."""

    def __init__(self, over_in: int = 0) -> None:
        super().__init__()
        self.events: list[str] = []
        self._over_in = over_in

    def launch(self, step: m.Step, take: Any) -> LaunchedStep:
        self.events.append(f"launch {step.step_id}")
        if step.step_id == ABANDONED:
            raise StepAbandonedError
        self.num_over += step.step_id == self._over_in
        return super().launch(step, take)

    def collect(self) -> Sampled:
        self.events.append(f"publish {self.launched_steps[0].step_id}")
        return super().collect()

    def drop_all(self, incarnation: int = 0) -> None:
        self.events.append(f"drop all rows for {incarnation}")


def events_of(runner: EventRunner, wakes: list[tuple[float, list[Any], int]]) -> list[str]:
    """What the loop calls in these wakes. Each step in flight is published in the end, once."""
    stage, sent = stage_of(ScriptedInbox(runner, wakes), ReplayContext())
    stage.reconnected = lambda message: runner.events.append("reconnected")
    stage.release = lambda: runner.events.append("|")
    run(stage, runner)
    published = [int(event.split()[1]) for event in runner.events if event.startswith("publish")]
    assert [one.step_id for one in sent] == published == sorted(published)
    return runner.events


ABANDONED = 99


def steps_of(*step_ids: int) -> list[m.Step]:
    return [make_step(step_id=step_id) for step_id in step_ids]


def test_steps_are_launched_while_earlier_ones_are_in_flight() -> None:
    """If a step is over when another one arrives, the scheduler gets its result first."""
    wakes: list[tuple[float, list[Any], int]] = [
        (0.0, [*steps_of(1, 2)], 0),
        (0.0, [*steps_of(3)], 1),
        (0.0, [], 1),
        (0.0, [*steps_of(4)], 0),
        (0.0, [m.Stop()], 0),
    ]
    expected = "launch 1, launch 2, |, publish 1, launch 3, |, publish 2, |, launch 4, |, publish 3, publish 4"
    assert events_of(EventRunner(), wakes) == expected.split(", ")


def test_a_step_that_ends_during_a_launch_is_published_before_the_next_launch() -> None:
    wakes: list[tuple[float, list[Any], int]] = [(0.0, [*steps_of(1, 2, 3)], 0), (0.0, [m.Stop()], 0)]
    expected = "launch 1, launch 2, publish 1, launch 3, |, publish 2, publish 3"
    assert events_of(EventRunner(over_in=2), wakes) == expected.split(", ")


def test_steps_in_flight_are_published_before_the_rows_of_a_dead_schedule_are_dropped() -> None:
    restarted = m.PeerRestarted(7, m.PeerInbox("schedule.0", "", 1), 3, [])
    wakes: list[tuple[float, list[Any], int]] = [
        (0.0, [*steps_of(1, 2, ABANDONED), restarted, *steps_of(3)], 0),
        (0.0, [m.Stop()], 0),
    ]
    expected = "launch 1, launch 2, launch 99, publish 1, publish 2, drop all rows for 3, reconnected, launch 3, |"
    assert events_of(EventRunner(), wakes) == [*expected.split(", "), "publish 3"]


def recording(path: Path, entries: list[f.Entry], *, from_start: bool) -> PlaybackContext:
    settings = msgspec.Raw(msgspec.msgpack.encode(Settings()))
    header = f.Header(f.FORMAT, "", "execute", 0, 0, 1, from_start, False, settings, "", [], [])
    path.write_bytes(f.MAGIC + b"".join(map(f.frame, [header, *entries])))
    return PlaybackContext(m.Replay(str(path), str(path) + ".out", paced=False), m.ExecuteInbox)


def turn(*messages: Any) -> f.LoopTurn:
    bodies = [msgspec.msgpack.encode(message) for message in messages]
    num = len(bodies)
    return f.LoopTurn(0, ["schedule.0"] * num, [1] * num, bodies, [[] for _ in bodies])


def complete(step_id: int) -> f.ObservedEvent:
    return f.ObservedEvent("complete", step_id, TIMES.pack(step_id, 0.25, 0.125, 0.0, 0.0, 0.0))


LAUNCHED = f.Value("monotonic", 1.0)


def test_a_recording_started_in_the_middle_is_replayed_with_its_own_times(tmp_path: Path) -> None:
    """Ends of steps that were launched before it, or are left out of it, are ignored."""
    entries: list[f.Entry] = [
        turn(make_step([(0, 0, 1, True)], adds=[row_add(0, [5], [1])], step_id=11)),
        LAUNCHED,
        complete(10),
        turn(make_step([(7, 3, 1, True)], step_id=12)),  # a row from before the recording
        LAUNCHED,
        turn(),
        complete(11),
        turn(make_step([(0, 1, 1, True)], step_id=13)),
        LAUNCHED,
        complete(12),
        complete(13),
        f.End("it reached its time limit"),
    ]
    replay_context = recording(tmp_path / "it.rec", entries, from_start=False)
    stage, sent = stage_of(ReplayInbox(replay_context), replay_context)
    run(stage, IdleRunner())
    replay_context.close()
    assert [(one.step_id, one.compute_s, one.wait_s) for one in sent] == [(11, 0.25, 0.125), (13, 0.25, 0.125)]


class DrainingRunner(IdleRunner):
    """Each step needs the ids that earlier steps sampled."""

    def launch(self, step: m.Step, take: Any) -> LaunchedStep:
        self.drain()
        return super().launch(step, take)


def test_results_that_a_later_step_waits_for_are_replayed_at_their_times(tmp_path: Path) -> None:
    entries: list[f.Entry] = [
        turn(make_step([(0, 0, 1, True)], adds=[row_add(0, [5], [1])], step_id=11)),
        LAUNCHED,
        complete(10),
        turn(make_step([(7, 3, 1, True)], step_id=12)),  # a row from before the recording
        turn(make_step([(0, 1, 1, True)], step_id=13)),
        LAUNCHED,
        complete(11),
        complete(12),
        turn(make_step([(0, 2, 1, True)], step_id=14)),
        LAUNCHED,
        complete(13),
        complete(14),
        f.End("it reached its time limit"),
    ]
    replay_context = recording(tmp_path / "it.rec", entries, from_start=False)
    stage, sent = stage_of(ReplayInbox(replay_context), replay_context)
    run(stage, DrainingRunner())
    replay_context.close()
    assert [(one.step_id, one.compute_s) for one in sent] == [(11, 0.25), (13, 0.25), (14, 0.25)]


@pytest.mark.parametrize("stops", [False, True])
def test_steps_in_flight_at_the_end_of_a_recording_have_no_results(tmp_path: Path, stops: bool) -> None:
    """Results that a stage waited for before it stopped are recorded."""
    steps = [make_step(step_id=1), make_step(step_id=2)]
    entries: list[f.Entry] = [LAUNCHED, turn(*steps), LAUNCHED, LAUNCHED, turn(), complete(1)]
    entries += [turn(m.Stop()), complete(2), f.End("it stopped")] if stops else [f.End("it reached its size limit")]
    replay_context = recording(tmp_path / "it.rec", entries, from_start=True)
    stage, sent = stage_of(ReplayInbox(replay_context), replay_context)
    run(stage, IdleRunner())
    replay_context.close()
    assert [one.step_id for one in sent] == [1, 2][: 1 + stops]
