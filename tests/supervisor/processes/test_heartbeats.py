"""Heartbeats: a stage that stops answering is late, and back with its next answer."""

import logging
import os
from typing import Any

import pytest

from pipeline.runtime import messages as m
from pipeline.supervisor.processes.heartbeats import HEARTBEAT_S, IDLE_AFTER_S, IDLE_HEARTBEAT_S, Heartbeats

TIMEOUT_S = 2.0
HANG_S = 30.0
NAMES = ("ingest.0", "execute.0")


class FakeChild:
    def __init__(self, name: str) -> None:
        self.name, self.state, self.pid = name, "ready", os.getpid()
        self.stage = name.partition(".")[0]
        self.num_aborts = 0

    def abort(self) -> None:
        self.num_aborts += 1


class World:
    """Heartbeats of two stages, with a clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.pinged: list[str] = []
        self.reports: list[dict[str, float]] = []
        self.silences: list[dict[str, float]] = []
        self.children: list[Any] = [FakeChild(name) for name in NAMES]
        log = logging.getLogger("tests.heartbeats")
        self.cpu_s = 0.0
        """CPU time of each stage."""
        self.beats = Heartbeats(
            lambda name, _: self.pinged.append(name),
            TIMEOUT_S,
            self._report,
            log,
            self._clock,
            hang_timeout_s=HANG_S,
            cpu_s=lambda _: self.cpu_s,
        )

    def _clock(self) -> float:
        return self.now_s

    def _report(self, late: m.LateStages) -> None:
        self.reports.append(dict(zip(late.names, late.since_s, strict=True)))
        self.silences.append(dict(zip(late.names, late.silent_since_s, strict=True)))

    def turn(self, after_s: float = 0.0) -> list[str]:
        """Advance the clock. Returns the stages that are pinged then."""
        self.now_s += after_s
        self.pinged.clear()
        self.beats.turn(self.children)
        return sorted(self.pinged)


@pytest.fixture
def world(caplog: pytest.LogCaptureFixture) -> World:
    caplog.set_level(logging.INFO)
    return World()


def test_every_stage_is_pinged_once_a_second_and_only_if_it_has_answered(world: World) -> None:
    assert world.turn() == []
    assert world.beats.deadlines == [world.now_s + HEARTBEAT_S] * 2
    assert world.turn(HEARTBEAT_S) == sorted(NAMES)
    world.beats.answered("ingest.0")
    assert world.turn(HEARTBEAT_S) == ["ingest.0"]
    assert world.reports == []


def test_without_open_requests_pings_are_rarer_until_one_is_seen(world: World) -> None:
    def answer(num_open: int = 0) -> None:
        for name in NAMES:
            world.beats.answered(name, num_open)

    world.turn()
    while world.now_s < 100.0 + IDLE_AFTER_S - HEARTBEAT_S:
        assert world.turn(HEARTBEAT_S) == sorted(NAMES)
        answer()
    assert world.beats.rest_s == HEARTBEAT_S
    assert world.turn(HEARTBEAT_S) == []
    assert world.beats.rest_s == IDLE_HEARTBEAT_S
    assert world.beats.deadlines == [world.now_s + IDLE_HEARTBEAT_S - HEARTBEAT_S] * 2
    assert world.turn(IDLE_HEARTBEAT_S - HEARTBEAT_S) == sorted(NAMES)
    assert world.beats.rest_s == HEARTBEAT_S, "a ping is open: a suspension of this process must be noticed"
    answer(num_open=1)
    assert world.turn(HEARTBEAT_S) == sorted(NAMES)


def test_a_stage_that_falls_silent_while_idle_is_late_after_the_same_timeout(world: World) -> None:
    world.turn()
    for _ in range(int(IDLE_AFTER_S)):
        world.turn(HEARTBEAT_S)
        for name in NAMES:
            world.beats.answered(name)
    pinged = world.turn(IDLE_HEARTBEAT_S)
    assert pinged == sorted(NAMES)
    world.beats.answered("ingest.0")
    world.turn(TIMEOUT_S)
    assert list(world.reports[-1]) == ["execute.0"]
    assert world.beats.interval_s == HEARTBEAT_S, "until it is back"


def test_stages_that_are_nearly_due_are_pinged_at_once(world: World) -> None:
    world.turn()
    world.turn(HEARTBEAT_S)
    world.beats.answered("ingest.0")
    world.now_s += 0.125
    world.beats.answered("execute.0")
    assert world.turn(0.75) == []
    assert world.turn(0.125) == sorted(NAMES)


def test_a_stage_that_does_not_answer_in_time_is_late_until_it_answers(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.turn()
    silent_since_s = world.now_s
    world.turn(HEARTBEAT_S)
    world.beats.answered("ingest.0")
    assert world.now_s + TIMEOUT_S in world.beats.deadlines
    assert world.turn(TIMEOUT_S) == ["ingest.0"]
    assert world.reports == [{"execute.0": silent_since_s}]
    world.beats.answered("ingest.0")
    assert world.turn(HEARTBEAT_S) == ["ingest.0"], "a late stage has a ping in its inbox"
    world.beats.answered("ingest.0")
    world.now_s += 6.0
    world.beats.answered("execute.0")
    assert world.reports == [{"execute.0": silent_since_s}, {}]
    lines = [(record.levelname, record.message, vars(record)["fields"]) for record in caplog.records]
    assert lines == [
        ("WARNING", "execute.0 is late", {"silent_s": "3.0"}),
        ("INFO", "execute.0 is back", {"silent_s": "10.0"}),
    ]


def test_answers_to_health_rounds_count_and_stages_that_stop_are_forgotten(world: World) -> None:
    world.turn()
    world.turn(HEARTBEAT_S)
    for name in NAMES:
        world.beats.answered(name)
    world.now_s += HEARTBEAT_S / 2
    world.beats.answered("ingest.0")
    assert world.turn(HEARTBEAT_S / 2) == ["execute.0"]
    world.children[1].state = "dead"
    world.turn(TIMEOUT_S)
    assert world.reports == []
    world.beats.answered("execute.0")
    world.beats.answered("prepare.0")


def aborts(world: World) -> dict[str, int]:
    return {child.name: child.num_aborts for child in world.children}


def go_late(world: World) -> None:
    world.turn()
    world.turn(HEARTBEAT_S)
    world.turn(TIMEOUT_S)


def test_a_stage_that_hangs_is_killed_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    go_late(world)
    world.turn(HANG_S - HEARTBEAT_S - TIMEOUT_S - 0.1)
    assert aborts(world) == {"ingest.0": 0, "execute.0": 0}
    for _ in range(3):
        world.turn(0.1)
    assert aborts(world) == {"ingest.0": 1, "execute.0": 1}
    assert "ingest.0 hangs; killing it" in caplog.text


def test_an_executor_that_computes_gets_longer(world: World) -> None:
    go_late(world)
    for _ in range(20):
        world.cpu_s += 10
        world.turn(10)
    assert aborts(world) == {"ingest.0": 1, "execute.0": 0}
    for _ in range(10):
        world.cpu_s += 10
        world.turn(10)
    assert aborts(world)["execute.0"] == 1, "but not for ever"


def test_the_time_in_which_the_supervisor_was_suspended_does_not_count(world: World) -> None:
    go_late(world)
    silent_since_s = world.now_s - HEARTBEAT_S - TIMEOUT_S
    world.now_s += 10 * HANG_S
    world.beats.suspended(10 * HANG_S)
    assert world.reports[-1] == dict.fromkeys(NAMES, silent_since_s + 10 * HANG_S), "the gateways learn of it"
    assert world.silences[-1] == dict.fromkeys(NAMES, silent_since_s), "requests may have come since"
    world.turn(HANG_S - HEARTBEAT_S - TIMEOUT_S - 0.1)
    assert aborts(world) == {"ingest.0": 0, "execute.0": 0}
    world.turn(0.1)
    assert aborts(world) == {"ingest.0": 1, "execute.0": 1}, "a stage that hangs is killed nevertheless"


def test_a_ping_that_was_on_its_way_when_the_supervisor_was_suspended_may_still_be_answered(world: World) -> None:
    world.turn()
    world.turn(HEARTBEAT_S)
    world.now_s += 100.0
    world.beats.suspended(100.0)
    world.turn()
    assert world.reports == [] and not world.beats.is_late(world.children[0])
    world.turn(TIMEOUT_S)
    assert [set(report) for report in world.reports] == [set(NAMES)]


def test_a_stage_that_has_died_is_late_until_its_successor_is_ready(world: World) -> None:
    world.turn()
    died_s = world.now_s
    execute = world.children[1]
    execute.state = "recovering"
    world.beats.lost("execute.0")
    assert world.turn(HEARTBEAT_S) == ["ingest.0"]
    world.beats.answered("ingest.0")
    execute.state = "ready"
    world.turn(HEARTBEAT_S)
    assert world.reports == [{"execute.0": died_s}, {}]


def test_the_time_of_a_death_is_known_after_a_suspension(world: World) -> None:
    world.turn()
    died_s = world.now_s
    world.beats.lost("execute.0")
    world.beats.suspended(100.0)
    assert world.reports[-1] == {"execute.0": died_s + 100.0}
    assert world.silences[-1] == {"execute.0": died_s}


def test_an_executor_that_computes_is_late_only_after_ten_times_as_long(world: World) -> None:
    world.turn()
    silent_since_s = world.now_s
    world.turn(HEARTBEAT_S)
    execute = world.children[1]
    for _ in range(9):
        world.cpu_s += TIMEOUT_S / 2
        assert world.beats.is_computing(execute) and not world.beats.is_computing(world.children[0])
        world.turn(TIMEOUT_S)
        assert world.now_s + TIMEOUT_S in world.beats.deadlines, "looks again after the same time"
    assert world.reports == [{"ingest.0": silent_since_s}], "other stages have no excuse"
    world.cpu_s += TIMEOUT_S / 2
    world.turn(TIMEOUT_S)
    assert set(world.reports[-1]) == set(NAMES)
    assert not world.beats.is_computing(execute)


def test_a_rank_that_waits_for_one_that_computes_is_not_late(world: World) -> None:
    world.children = [FakeChild("execute.0"), FakeChild("execute.1")]
    world.children[1].pid = world.children[0].pid + 1
    world.beats._cpu_s = lambda child: world.cpu_s if child is world.children[0] else 0.0
    world.turn()
    world.turn(HEARTBEAT_S)
    for _ in range(3):
        world.cpu_s += TIMEOUT_S
        assert world.beats.is_computing(world.children[1])
        world.turn(TIMEOUT_S)
    assert world.reports == []
    world.turn(TIMEOUT_S)
    assert set(world.reports[-1]) == {"execute.0", "execute.1"}


def test_an_executor_that_stops_computing_without_an_answer_is_late(world: World) -> None:
    world.turn()
    world.turn(HEARTBEAT_S)
    world.beats.answered("ingest.0")
    assert world.beats.is_computing(world.children[1]) is False, "it has used no CPU yet"
    world.cpu_s += TIMEOUT_S
    world.turn(TIMEOUT_S)
    world.beats.answered("ingest.0")
    assert world.reports == []
    world.turn(TIMEOUT_S)
    assert [set(report) for report in world.reports] == [{"execute.0"}]


def test_a_successor_does_not_owe_the_answer_to_its_predecessors_ping() -> None:
    """After a planned restart a stage is never not ready, but its new process has not got the ping."""
    world = World()
    world.turn()
    assert "ingest.0" in world.turn(HEARTBEAT_S)
    world.children[0] = FakeChild("ingest.0")
    world.children[0].pid = os.getppid()
    world.turn(0.1)
    assert "ingest.0" in world.turn(HEARTBEAT_S)
    world.beats.answered("ingest.0")
    world.beats.answered("execute.0")
    world.turn(TIMEOUT_S)
    assert world.children[0].num_aborts == 0 and world.reports == []


def test_a_successor_of_a_late_stage_is_not_late() -> None:
    world = World()
    world.turn()
    world.turn(HEARTBEAT_S)
    world.beats.answered("execute.0")
    world.turn(TIMEOUT_S)
    assert world.reports[-1].keys() == {"ingest.0"}
    world.children[0] = FakeChild("ingest.0")
    world.children[0].pid = os.getppid()
    world.turn(0.1)
    assert world.reports[-1] == {}
