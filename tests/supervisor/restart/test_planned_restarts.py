"""Restarts on purpose: the successor first, then the end of the process before."""

import gc
import logging
import os
from collections.abc import Iterator
from typing import Any

import msgspec
import psutil
import pytest

from pipeline.config.settings import ExecuteSettings, GatewaySettings, Settings
from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.supervisor.restart import planned_restarts
from pipeline.supervisor.restart.planned_restarts import HAND_OVER_S, LAST_WORDS_S, PlannedRestarts
from pipeline.supervisor.run_mode import RunMode
from pipeline.supervisor.shared.resources import SharedResources

FACTS = m.ExecuteFacts(num_blocks=64, block_size=16, max_model_len=512, vocab_size=1000, hidden_size=8)


class FakeChild:
    def __init__(self, name: str, state: str = "ready", pid: int = 1) -> None:
        self.name, self.stage, self.state, self.pid = name, name.partition(".")[0], state, pid
        self.is_alive = True

    def kill(self) -> None:
        self.is_alive = False

    def describe_end(self) -> str:
        return "was killed by SIGSEGV"


class Bench:
    """Planned restarts whose processes, inbox and clock are the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, settings: Settings, run_mode: RunMode) -> None:
        self.resources = SharedResources(settings, [], [], None)
        self.resources.create_arenas()
        self.resources.create_rings()
        self.children = {name: FakeChild(name) for name in self.resources.incarnations}
        self.outboxes = {name: Sink() for name in self.children}
        self.early: dict[str, list[Any]] = {}
        self.started: list[FakeChild] = []
        self.dropped: list[str] = []
        self.taken_over: list[str] = []
        self.answers: dict[str, tuple[float, str]] = {}
        self.now_s = 100.0
        monkeypatch.setattr(planned_restarts, "time", self)
        table: Any = self
        inbox: Any = self
        self.restarts = PlannedRestarts(run_mode, self.resources, table, inbox, logging.getLogger("test"), self.take)
        monkeypatch.setattr(planned_restarts, "launch_of", lambda name, *_: name)

    def monotonic(self) -> float:
        return self.now_s

    # As a ChildTable and an Inbox.
    def start_successor(self, name: Any) -> FakeChild:
        self.started.append(FakeChild(name, "recovering", pid=2))
        return self.started[-1]

    def drop(self, child: FakeChild) -> None:
        self.dropped.append(child.name)

    def early_of(self, name: str) -> list[Any]:
        return self.early.get(name, [])

    def drop_early(self, name: str) -> None:
        self.early.pop(name, None)

    def take(self, successor: Any) -> None:
        self.children[successor.name].kill()
        self.children[successor.name] = successor
        self.taken_over.append(successor.name)

    def ask(self, name: str) -> None:
        self.restarts.ask(name, "a test", lambda pause_s, problem: self.answers.__setitem__(name, (pause_s, problem)))
        self.turn()

    def turn(self) -> None:
        self.restarts.turn("/model", FACTS)


class Sink:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> bool:
        self.sent.append(message)
        return True


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Bench]:
    settings, run_mode = getattr(request, "param", (Settings(), RunMode()))
    bench = Bench(monkeypatch, settings, run_mode)
    yield bench
    bench.restarts.close()
    bench.resources.close()


def num_fds() -> int:
    """Open descriptors, without those of garbage of earlier tests, which may be collected at any time."""
    gc.collect()
    return int(psutil.Process().num_fds())


def test_a_successor_takes_over_when_it_is_ready_and_the_answer_comes_when_it_serves(bench: Bench) -> None:
    fds = num_fds()
    bench.ask("ingest.0")
    assert [one.name for one in bench.started] == ["ingest.0"]
    bench.turn()
    assert not bench.taken_over and bench.children["ingest.0"].is_alive
    bench.early["ingest.0"] = [m.Ready(None)]
    bench.turn()
    assert bench.taken_over == ["ingest.0"] and not bench.answers
    assert not bench.restarts.has_killed("ingest.0"), "if the successor dies now, that was not asked for"
    bench.restarts.ready("ingest.0", 0.004)
    assert bench.answers == {"ingest.0": (0.004, "")}
    assert bench.resources.incarnations["ingest.0"] == 2 and num_fds() == fds


@pytest.mark.parametrize("has_answer", [True, False])
def test_schedule_settles_its_steps_before_its_successor_takes_over(bench: Bench, has_answer: bool) -> None:
    bench.ask("schedule.0")
    bench.early["schedule.0"] = [m.Ready(None)]
    bench.turn()
    bench.turn()
    assert bench.outboxes["schedule.0"].sent == [m.HandOver()]
    assert not bench.taken_over and bench.restarts.deadlines[-1] == bench.now_s + HAND_OVER_S
    if has_answer:
        bench.restarts.drained("schedule.0")
    else:
        bench.restarts.suspended(3.0)
        bench.now_s += HAND_OVER_S
        bench.turn()
        assert not bench.taken_over, "the time in which all were suspended does not count"
        bench.now_s += 3.0
    bench.turn()
    assert bench.taken_over == ["schedule.0"] and not bench.restarts.has_killed("schedule.0")
    bench.restarts.ready("schedule.0", 0.004)
    assert bench.answers == {"schedule.0": (0.004, "")}


@pytest.mark.parametrize("says_why", [True, False])
def test_a_successor_that_fails_changes_nothing(bench: Bench, says_why: bool) -> None:
    address, fds = bench.resources.addresses["ingest.0"], num_fds()
    bench.ask("ingest.0")
    assert bench.resources.addresses["ingest.0"] != address
    if says_why:
        bench.early["ingest.0"] = [m.StageFailed("no such template")]
    else:
        bench.started[0].kill()
        bench.turn()
        assert not bench.answers, "its last words may be on their way"
        bench.now_s += LAST_WORDS_S
    bench.turn()
    assert bench.answers["ingest.0"][1] == ("no such template" if says_why else "was killed by SIGSEGV")
    assert bench.resources.addresses["ingest.0"] == address and bench.resources.incarnations["ingest.0"] == 1
    assert bench.dropped == ["ingest.0"] and bench.children["ingest.0"].is_alive and num_fds() == fds
    bench.ask("ingest.0")
    assert bench.resources.incarnations["ingest.0"] == 3, "nothing takes its messages for those of the one that failed"


def test_a_successor_that_hangs_is_given_up(bench: Bench) -> None:
    bench.ask("ingest.0")
    bench.restarts.suspended(3.0)
    bench.now_s += Settings().supervisor.start_timeout_s
    bench.turn()
    assert not bench.answers, "the time in which all were suspended does not count"
    bench.now_s += 3.0
    bench.turn()
    assert "supervisor.start_timeout_s" in bench.answers["ingest.0"][1] and bench.dropped == ["ingest.0"]


def test_successors_start_one_after_the_other(bench: Bench) -> None:
    bench.ask("ingest.0")
    bench.ask("schedule.0")
    assert [one.name for one in bench.started] == ["ingest.0"]
    bench.early["ingest.0"] = [m.Ready(None)]
    bench.turn()
    bench.turn()
    assert [one.name for one in bench.started] == ["ingest.0", "schedule.0"]
    bench.ask("schedule.0")
    assert bench.answers["schedule.0"][1] == "schedule.0 is being restarted already"


def test_if_another_stage_dies_a_successor_takes_over_at_once(bench: Bench) -> None:
    bench.ask("ingest.0")
    bench.restarts.take_over_now()
    assert bench.taken_over == ["ingest.0"]
    bench.restarts.take_over_now()
    assert bench.taken_over == ["ingest.0"]


def test_a_gateway_ends_its_streams_first(bench: Bench) -> None:
    bench.ask("gateway.0")
    assert bench.outboxes["gateway.0"].sent == [m.Drain(Settings().supervisor.drain_timeout_s)]
    bench.turn()
    assert bench.children["gateway.0"].is_alive and not bench.started
    bench.restarts.drained("gateway.0")
    assert not bench.children["gateway.0"].is_alive and bench.restarts.has_killed("gateway.0")
    bench.restarts.noticed("gateway.0")
    assert not bench.restarts.has_killed("gateway.0")
    bench.restarts.ready("gateway.0", 0.8)
    assert bench.answers == {"gateway.0": (0.8, "")}


@pytest.mark.parametrize("bench", [(Settings(execute=ExecuteSettings(device="cuda")), RunMode())], indirect=True)
def test_on_a_gpu_the_executor_ends_before_its_successor_starts(bench: Bench) -> None:
    bench.ask("execute.0")
    assert not bench.children["execute.0"].is_alive and not bench.started and bench.restarts.has_killed("execute.0")


@pytest.mark.parametrize("bench", [(Settings(), RunMode(foreground="schedule.0"))], indirect=True)
def test_stages_that_are_debugged_are_not_restarted(bench: Bench) -> None:
    bench.ask("ingest.0")
    assert bench.answers["ingest.0"][1] == "stages that are debugged are not restarted" and not bench.started


@pytest.mark.parametrize("bench", [(Settings(gateway=GatewaySettings(replicas=2)), RunMode())], indirect=True)
def test_channels_are_restored_as_they_were(bench: Bench) -> None:
    """With the edges that two replicas share."""
    resources = bench.resources
    before = {name: resources._channels_of(name) for name in resources.incarnations}
    fds = num_fds()
    resources.restore(resources.replace("ingest.0"))
    assert num_fds() == fds
    assert {name: resources._channels_of(name) for name in resources.incarnations} == before
    for channels in before.values():
        fds_of = [fd for ring in channels.rings.values() for fd in ring]
        for fd in fds_of + ([channels.segment.fd] if channels.segment is not None else []):
            os.fstat(fd)  # it is open


def test_schedule_learns_whether_the_settings_of_the_executor_have_changed() -> None:
    """If so, what the one before wrote to swap space is of no use."""
    resources = SharedResources(Settings(), [], [], None)

    def is_informed() -> bool:
        found = resources.restart_of("execute.0", "schedule.0", 1)
        assert found is not None
        return found[0].has_other_settings

    def change(**changes: Any) -> None:
        execute = msgspec.structs.replace(resources.settings.execute, **changes)
        resources.settings = msgspec.structs.replace(resources.settings, execute=execute)

    try:
        resources.create_arenas()
        resources.create_rings()
        resources.launch("execute", "", [])
        resources.renew("execute.0")
        assert not is_informed(), "it has died"
        resources.launch("execute", "", [])
        change(activations="int8")
        before = resources.replace("execute.0")
        resources.launch("execute", "", [])
        assert is_informed(), "its successor takes over"
        resources.restore(before)
        resources.renew("execute.0")
        assert is_informed(), "that successor did not start, and then the one before died"
        resources.launch("execute", "", [])
        resources.renew("execute.0")
        assert not is_informed()
    finally:
        resources.close()


@pytest.mark.parametrize(
    ("name", "size"),
    [
        (topology.OFFLOAD_INDEX, 2**21),
        (topology.KV_INDEX, 2**24),
        (topology.STATE_INDEX, 2**20),
        (topology.OFFLOAD_STATE_INDEX, 2**20),
    ],
)
def test_what_its_successor_needs_outlives_a_scheduler(name: str, size: int) -> None:
    settings = Settings(execute=ExecuteSettings(swap_bytes=2**26))
    resources = SharedResources(settings, [], [], None)
    try:
        resources.create_arenas()
        resources.reserve_swap(with_model=False)
        segments = []
        for _ in range(2):
            launch = resources.launch("schedule", "", [])
            segments += [one for one in launch.segments if one.name == name]
            resources.renew("schedule.0")
        assert segments == [m.Segment(name, segments[0].fd, size, True)] * 2
        assert os.fstat(segments[0].fd).st_size == size and os.fstat(segments[0].fd).st_blocks == 0
        assert name not in [one.name for one in resources.launch("execute", "", []).segments]
    finally:
        resources.close()
