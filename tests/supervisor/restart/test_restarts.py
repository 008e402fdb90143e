"""Who is informed of a restart, and what happens to a process that can't be."""

import errno
import logging
import os
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from pipeline.config.settings import ExecuteSettings, Settings
from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.runtime.process import black_box
from pipeline.supervisor.crashes.crash_counts import MAX_CRASHES
from pipeline.supervisor.restart.planned_restarts import launch_of
from pipeline.supervisor.restart.restarts import Restarts
from pipeline.supervisor.run_mode import RunMode
from pipeline.supervisor.shared.resources import SharedResources


class FakeChild:
    """A process that takes messages, unless its control socket is `closed` or `full`."""

    is_lost = False

    def __init__(self, name: str) -> None:
        self.name, self.stage, self.state, self.pid, self.incarnation = name, name.partition(".")[0], "ready", 1, 1
        self.is_alive, self.num_aborts, self.num_restarts = True, 0, 0
        self.started_s = self.suspended_s = 0.0
        self.control = "open"
        self.was_killed = False

    def send_descriptors(self, epoch: int, fds: list[int]) -> bool:
        if self.control == "closed":
            raise BrokenPipeError
        return self.control == "open"

    def abort(self) -> None:
        self.num_aborts += 1

    def kill(self) -> None:
        self.was_killed, self.is_alive = True, False


class FakeOutbox:
    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.is_full = False

    def send(self, message: Any) -> bool:
        if not self.is_full:
            self.sent.append(message)
        return not self.is_full


class Bench:
    """Restarts of fake processes."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.resources = SharedResources(settings or Settings(), [], [], None)
        self.resources.create_arenas()
        self.resources.create_rings()
        self.children = {name: FakeChild(name) for name in self.resources.incarnations}
        self.outboxes = {name: FakeOutbox() for name in self.children}
        bench: Any = self
        self.restarts = Restarts(RunMode(), self.resources, bench, bench, logging.getLogger("test"))

    # As a ChildTable and an Inbox.
    def lost(self, child: FakeChild, address: str) -> None:
        child.state, child.is_alive = "recovering", False

    def replaced(self, name: str, incarnation: int) -> None:
        pass

    def die(self, name: str) -> None:
        child: Any = self.children[name]
        assert self.restarts.died(child, "was killed by SIGKILL") == ""

    def black_box(self, name: str) -> memoryview:
        """The memory in which a process of this name leaves what explains its death."""
        return black_box.attach(self.resources.launch(topology.stage_of(name), "", []).black_box)

    def informed(self, name: str) -> list[str]:
        return [message.peer.name for message in self.outboxes[name].sent if isinstance(message, m.PeerRestarted)]

    def last_informed(self, name: str) -> m.PeerRestarted:
        message = self.outboxes[name].sent[-1]
        assert isinstance(message, m.PeerRestarted)
        return message

    def num_aborts(self) -> dict[str, int]:
        return {name: child.num_aborts for name, child in self.children.items() if child.num_aborts}


@pytest.fixture
def bench() -> Iterator[Bench]:
    one = Bench()
    yield one
    one.resources.close()


def test_a_neighbour_that_is_ending_is_left_to_its_end(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """The kernel closes the sockets of a process that was killed before its end can be seen, and a stage that fails
    closes them before it has sent its reason."""
    bench.children["execute.0"].control = "closed"
    bench.die("schedule.0")
    assert bench.informed("ingest.0") == bench.informed("detokenize.0") == ["schedule.0"]
    assert bench.informed("execute.0") == [] and not bench.num_aborts() and "killing" not in caplog.text
    assert not bench.restarts.recovery.is_known("schedule.0")
    bench.die("execute.0")
    for name in ("ingest.0", "detokenize.0"):
        for message in bench.outboxes[name].sent:
            bench.restarts.answered(name, message.epoch)
    assert bench.informed("gateway.0") == ["schedule.0"], "it waits for no answer of a process that has ended"


@pytest.mark.parametrize("what", ["descriptors", "messages"])
def test_a_neighbour_that_reads_nothing_any_more_is_killed(
    bench: Bench, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    if what == "descriptors":
        bench.children["execute.0"].control = "full"
    else:
        bench.outboxes["execute.0"].is_full = True
    bench.die("schedule.0")
    assert bench.num_aborts() == {"execute.0": 1}
    assert "execute.0 does not accept messages; killing it" in caplog.text


def test_without_a_free_descriptor_a_restart_is_given_up_with_the_reason(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other stages are stopped in order then, which an exception here would not do."""

    def renew(*_: Any, **__: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files", "/proc/meminfo")

    monkeypatch.setattr(bench.resources, "renew", renew)
    child: Any = bench.children["schedule.0"]
    assert "Too many open files" in bench.restarts.died(child, "was killed by SIGKILL")


def test_a_start_does_not_count_the_time_in_which_the_supervisor_was_suspended(bench: Bench) -> None:
    timeout_s = bench.resources.settings.supervisor.start_timeout_s
    bench.die("schedule.0")
    bench.restarts._due_s.clear()
    successor = bench.children["schedule.0"]
    successor.is_alive = True
    bench.restarts.suspended(1e9)
    facts = m.ExecuteFacts(num_blocks=64, block_size=16, max_model_len=512, vocab_size=1000, hidden_size=8)
    bench.restarts.turn("/model", facts)
    assert successor.num_aborts == 0
    successor.suspended_s = -timeout_s
    bench.restarts.turn("/model", facts)
    assert successor.num_aborts == 1


def test_only_a_process_that_was_at_work_has_crashed(bench: Bench) -> None:
    """Otherwise schedule would suspect requests that the executor has never computed."""
    executor: Any = bench.children["execute.0"]
    black_box.SuspectList(bench.black_box("schedule.0")).replace([5])
    bench.die("execute.0")
    assert bench.last_informed("schedule.0").crash_counts == {5: 1}
    bench.die("execute.0")  # its successor, while it starts
    assert bench.last_informed("schedule.0").crash_counts == {5: 1}
    executor.state, executor.is_alive = "ready", True
    bench.die("execute.0")
    assert bench.last_informed("schedule.0").crash_counts == {5: 2}
    bench.resources.discard(bench.resources.replace("execute.0"))  # by a restart on purpose
    bench.restarts.inform("execute.0")
    assert bench.last_informed("schedule.0").crash_counts == {5: 2}
    executor.state, executor.is_alive, executor.is_lost = "ready", True, True
    bench.die("execute.0")
    assert bench.last_informed("schedule.0").crash_counts == {5: 2}, "with its host"


def test_schedule_fails_a_request_before_it_learns_of_a_successor_that_would_get_it(bench: Bench) -> None:
    """The gateways learn of it too, without waiting for the stages' answers."""
    detokenize: Any = bench.children["detokenize.0"]
    for num in range(1, MAX_CRASHES + 1):
        bench.outboxes["schedule.0"].sent.clear()
        detokenize.is_alive = True  # its state is not `ready`: the message may be lost if it dies at once
        black_box.Breadcrumb(bench.black_box("detokenize.0")).at(5, 1)
        bench.die("detokenize.0")
        sent = [type(message) for message in bench.outboxes["schedule.0"].sent]
        assert sent == [m.PeerRestarted] if num < MAX_CRASHES else [m.FailRequests, m.PeerRestarted]
    failing = m.FailRequests({5: f"detokenize died {MAX_CRASHES}{m.DIED_OF_REQUEST}"})
    assert bench.outboxes["schedule.0"].sent[0] == bench.outboxes["gateway.0"].sent[-1] == failing
    assert bench.outboxes["ingest.0"].sent == []


def test_a_scheduler_that_starts_after_the_crash_knows_it_from_its_launch(bench: Bench) -> None:
    for num in range(1, MAX_CRASHES + 1):
        child: Any = bench.children["schedule.0"]
        child.state, child.is_alive = "ready", True
        black_box.SuspectList(bench.black_box("schedule.0")).replace([5])
        bench.die("schedule.0")
        assert bench.resources.launch("schedule", "", []).crash_counts == {5: num}
    failing = [one for one in bench.outboxes["gateway.0"].sent if isinstance(one, m.FailRequests)]
    assert [list(one.errors) for one in failing] == [[5]]
    assert not any(isinstance(one, m.FailRequests) for one in bench.outboxes["schedule.0"].sent)


class TestRanks:
    """An executor of two ranks."""

    @pytest.fixture
    def ranks(self) -> Iterator[Bench]:
        bench = Bench(Settings(execute=ExecuteSettings(tensor_parallel=2)))
        yield bench
        bench.resources.close()

    @pytest.mark.parametrize("name", ["execute.0", "execute.1"])
    def test_if_one_dies_all_are_replaced_and_the_first_is_announced_last(self, ranks: Bench, name: str) -> None:
        before = ranks.resources.launch("execute", "", []).ranks_fd
        inode = os.fstat(before).st_ino
        black_box.SuspectList(ranks.black_box("schedule.0")).replace([5])
        ranks.die(name)
        other = ranks.children["execute.1" if name == "execute.0" else "execute.0"]
        assert other.was_killed and not ranks.children[name].was_killed
        assert ranks.informed("schedule.0") == ["execute.1", "execute.0"]
        assert ranks.last_informed("schedule.0").crash_counts == {5: 1}
        assert [ranks.resources.incarnations[f"execute.{rank}"] for rank in range(2)] == [2, 2]
        launches = [ranks.resources.launch("execute", "", [], rank) for rank in range(2)]
        assert len({launch.ranks_fd for launch in launches}) == 1
        assert os.fstat(launches[0].ranks_fd).st_ino != inode, "the ranks would use the barriers of the dead ones"
        assert [launch.incarnation for launch in launches] == [2, 2]

    def test_each_has_its_own_memory_for_its_library_which_outlives_it(self, ranks: Bench) -> None:
        def inodes() -> list[int]:
            fds = [ranks.resources.launch("execute", "", [], rank).library_fd for rank in range(2)]
            return [os.fstat(fd).st_ino for fd in fds]

        before = inodes()
        assert len(set(before)) == 2
        ranks.die("execute.0")
        assert inodes() == before
        assert ranks.resources.launch("schedule", "", []).library_fd == -1

    def test_a_successor_gets_its_own_back_end_and_not_that_of_another_rank(self, ranks: Bench) -> None:
        """On other hosts they may differ."""
        own = m.Backend("avx2", "0a")
        ranks.resources.backends = {"execute.0": m.Backend("avx512", "0b"), "execute.1": own}
        facts = m.ExecuteFacts(64, 16, 512, 1000, backend=m.Backend.of_ranks(ranks.resources.backends.values()))
        launch = launch_of("execute.1", ranks.resources, "", facts)
        assert launch.facts == msgspec.structs.replace(facts, backend=own)
        assert launch_of("schedule.0", ranks.resources, "", facts).facts == facts

    def test_only_the_one_that_died_counts_as_restarted_too_often(self, ranks: Bench) -> None:
        for _ in range(ranks.resources.settings.supervisor.max_restarts):
            ranks.die("execute.1")
            for child in ranks.children.values():
                child.state, child.is_alive = "ready", True
        ranks.die("execute.0")
        assert "supervisor.max_restarts" in ranks.restarts.died(ranks.children["execute.1"], "x")  # type: ignore[arg-type]


class TestLostHost:
    """The executor runs on another host, which is lost."""

    @pytest.fixture
    def lost(self) -> Iterator[Bench]:
        one = Bench(Settings(execute=ExecuteSettings(launcher="ray", tensor_parallel=2)))
        one.resources.set_address("execute.0", "tcp://10.0.0.1:2")
        one.resources.set_address("execute.1", "tcp://10.0.0.1:3")
        one.restarts.has_host = lambda name: not name.startswith("execute")
        for rank in range(2):
            child: Any = one.children[f"execute.{rank}"]
            child.is_alive, child.is_lost = False, True
        one.die("execute.0")
        yield one
        one.resources.close()

    def test_schedule_is_notified_at_once_and_again_when_there_is_another_host(self, lost: Bench) -> None:
        assert lost.informed("schedule.0") == ["execute.1", "execute.0"]
        first = lost.last_informed("schedule.0")
        assert first.peer.address == "tcp://10.0.0.1:2"
        assert not lost.restarts.deadlines, "they wait for a host, without a deadline of their own"
        for rank in range(2):
            lost.resources.set_address(f"execute.{rank}", f"tcp://10.0.0.9:{rank}")
        lost.restarts.hosts_found()
        assert lost.informed("schedule.0") == ["execute.1", "execute.0"] * 2
        second = lost.last_informed("schedule.0")
        assert second.peer.address == "tcp://10.0.0.9:0" and second.incarnation == first.incarnation + 1
        assert second.peer.public_key not in ("", first.peer.public_key)
        lost.restarts.has_host = lambda _: True
        assert len(lost.restarts.deadlines) == 2

    def test_a_host_that_is_found_while_nothing_waits_for_it_changes_nothing(self, bench: Bench) -> None:
        bench.restarts.hosts_found()
        assert not any(bench.informed(name) for name in bench.children)
