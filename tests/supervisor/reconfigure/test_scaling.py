"""When processes are added and removed, and what happens if one dies meanwhile."""

import gc
from collections.abc import Callable

import psutil
import pytest

from pipeline.config.settings import Settings
from pipeline.runtime import topology
from pipeline.supervisor.reconfigure.scaling import DRAIN_SLACK_S, STOP_S, Scaling
from pipeline.supervisor.shared.resources import SharedResources

START_S, DRAIN_S = 60.0, 30.0


class Bench:
    """A change whose processes and clock are the test's. `done` lists what was asked of the processes, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.now_s = 100.0
        self.scaling = Scaling(self, lambda: self.now_s)
        self.answers: list[str] = []
        self.unknown: set[str] = set()
        self.restarting: set[str] = set()
        self.has_to_wait: set[str] = set()
        """New processes that may not start yet."""
        self.full = ""
        """The process for which there is no memory."""
        self.receivers = {"gateway.0"}
        self.epoch = 0

    def ask(self, stage: str, before: int, after: int) -> None:
        self.scaling.ask(stage, before, after, START_S, DRAIN_S, self.answers.append)
        self.scaling.turn()

    def after(self, *happens: Callable[[], object]) -> list[str]:
        """What was asked of the processes since the last call, after these events."""
        for one in happens:
            one()
        self.scaling.turn()
        calls, self.calls = self.calls, []
        return calls

    def rescaled(self) -> None:
        for name in self.receivers:
            self.scaling.answered(name, self.epoch)

    # Processes.

    def add(self, name: str) -> None:
        if name == self.full:
            raise MemoryError("too little memory")
        self.calls.append(f"add {name}")

    def may_start(self, name: str) -> bool:
        return name not in self.has_to_wait

    def start(self, name: str) -> None:
        self.calls.append(f"start {name}")

    def join(self, name: str) -> None:
        self.calls.append(f"join {name}")

    def may_leave(self, name: str) -> bool:
        return name not in self.restarting

    def leave(self, name: str) -> None:
        self.calls.append(f"leave {name}")

    def drain(self, name: str) -> bool:
        self.calls.append(f"drain {name}")
        return name.startswith("detokenize.")

    def stop(self, name: str) -> None:
        self.calls.append(f"stop {name}")

    def remove(self, name: str) -> None:
        self.calls.append(f"remove {name}")

    def is_known(self, name: str) -> bool:
        return name not in self.unknown

    def rescale(self, stage: str, num: int) -> tuple[int, set[str]]:
        self.calls.append(f"{stage} = {num}")
        self.epoch += 1
        return self.epoch, set(self.receivers)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_new_processes_get_work_when_all_know_them_and_all_are_ready(bench: Bench) -> None:
    bench.unknown = {"ingest.2"}
    bench.ask("ingest", 1, 3)
    assert bench.after() == ["add ingest.1", "add ingest.2", "start ingest.1", "start ingest.2"]
    ready = bench.scaling.ready
    assert bench.after(lambda: ready("ingest.1"), lambda: ready("ingest.2")) == [], "others have not answered"
    assert bench.after(bench.unknown.clear) == ["ingest = 3"]
    assert bench.scaling.owns("ingest.2") and not bench.answers
    bench.scaling.answered("gateway.0", bench.epoch - 1)
    assert bench.after() == [], "an answer to something else"
    assert bench.after(bench.rescaled) == ["join ingest.1", "join ingest.2"]
    assert bench.answers == [""] and not bench.scaling.is_busy and not bench.scaling.owns("ingest.2")


def test_processes_that_leave_get_no_work_drain_and_are_removed_the_last_first(bench: Bench) -> None:
    bench.restarting = {"ingest.1"}
    bench.ask("ingest", 3, 1)
    assert bench.after() == [], "it is restarted first, so that nothing of it is forgotten"
    assert not bench.scaling.died("ingest.1", "was killed"), "it is an ordinary death until then"
    assert bench.after(bench.restarting.clear) == ["leave ingest.2", "leave ingest.1", "ingest = 1"]
    assert bench.after(bench.rescaled) == ["drain ingest.2", "drain ingest.1"]
    assert bench.after(lambda: bench.scaling.drained("ingest.1")) == []
    assert bench.scaling.died("ingest.2", "was killed"), "it is not restarted"
    assert bench.after() == ["stop ingest.1"]
    assert bench.scaling.died("ingest.1", "exited")
    bench.unknown = {"ingest.1"}
    assert bench.after() == ["remove ingest.2", "remove ingest.1"] and not bench.answers
    assert bench.after(bench.unknown.clear) == [] and bench.answers == [""]


def test_a_detokenize_need_not_drain(bench: Bench) -> None:
    bench.ask("detokenize", 2, 1)
    assert bench.after(bench.rescaled)[-2:] == ["drain detokenize.1", "stop detokenize.1"]


def test_what_does_not_drain_or_end_in_time_is_removed(bench: Bench) -> None:
    bench.ask("gateway", 2, 1)
    assert bench.after() == ["leave gateway.1", "drain gateway.1"], "it keeps its share until it is gone"
    bench.now_s += DRAIN_S + DRAIN_SLACK_S
    assert bench.after() == ["stop gateway.1"]
    bench.now_s += STOP_S
    assert bench.after() == ["remove gateway.1", "gateway = 1"]
    assert bench.after(bench.rescaled) == [] and bench.answers == [""]


def test_gateways_give_up_a_part_of_their_limits_before_another_starts(bench: Bench) -> None:
    bench.ask("gateway", 1, 2)
    assert bench.after() == ["gateway = 2"]
    bench.has_to_wait = {"gateway.1"}
    assert bench.after(bench.rescaled) == ["add gateway.1"]
    assert bench.after(bench.has_to_wait.clear) == ["start gateway.1"]
    assert bench.after(lambda: bench.scaling.ready("gateway.1")) == ["join gateway.1"]
    assert bench.answers == [""]


def test_gateways_that_hold_too_much_keep_their_limits(bench: Bench) -> None:
    bench.ask("gateway", 1, 2)
    bench.now_s += DRAIN_S
    assert bench.after() == ["gateway = 2", "gateway = 1"]
    assert bench.after(bench.rescaled) == []
    assert "more open sequences or bytes than its new share" in bench.answers[0]


@pytest.mark.parametrize("stage", ["ingest", "gateway"])
def test_if_a_new_process_dies_all_new_ones_go(bench: Bench, stage: str) -> None:
    bench.ask(stage, 1, 3)
    bench.after(bench.rescaled)
    assert bench.scaling.died(f"{stage}.1", "was killed by SIGKILL")
    removed = [f"remove {stage}.2", f"remove {stage}.1"]
    assert bench.after() == (removed if stage == "ingest" else [*removed, "gateway = 1"])
    bench.after(bench.rescaled)
    assert bench.answers == [f"{stage}.1: was killed by SIGKILL"]


def test_a_new_process_that_has_work_loses_it_to_the_others_before_it_goes(bench: Bench) -> None:
    bench.ask("ingest", 1, 2)
    bench.after(lambda: bench.scaling.ready("ingest.1"))
    assert bench.scaling.died("ingest.1", "was killed")
    assert bench.after() == ["ingest = 1", "remove ingest.1"] and not bench.answers
    bench.after(bench.rescaled)
    assert bench.answers == ["ingest.1: was killed"]


def test_a_new_process_that_hangs_is_given_up(bench: Bench) -> None:
    bench.ask("ingest", 1, 2)
    bench.calls.clear()
    bench.now_s += START_S
    assert bench.after() == ["remove ingest.1"]
    assert "supervisor.start_timeout_s" in bench.answers[0]


def test_without_memory_nothing_changes(bench: Bench) -> None:
    bench.full = "ingest.2"
    bench.ask("ingest", 1, 3)
    assert bench.after() == ["add ingest.1", "remove ingest.1"] and bench.answers == ["too little memory"]


def test_the_successor_of_one_that_had_to_answer_begins_with_the_new_number(bench: Bench) -> None:
    bench.receivers = {"gateway.0", "gateway.1"}
    bench.ask("ingest", 2, 1)
    bench.scaling.answered("gateway.0", bench.epoch)
    assert bench.after() == ["leave ingest.1", "ingest = 1"]
    assert not bench.scaling.died("gateway.1", "was killed"), "it is restarted"
    assert bench.after() == ["drain ingest.1"]


def test_when_the_server_ends_new_processes_go_and_the_others_stay(bench: Bench) -> None:
    bench.ask("ingest", 1, 3)
    bench.calls.clear()
    assert bench.after(bench.scaling.cancel) == ["remove ingest.2", "remove ingest.1"]
    assert bench.answers == ["the server is shutting down"]
    bench.scaling.cancel()
    bench.ask("ingest", 2, 1)
    bench.calls.clear()
    assert bench.after(bench.scaling.cancel) == [] and len(bench.answers) == 2


def test_a_process_that_is_removed_leaves_nothing_and_a_later_one_has_a_number_of_its_own() -> None:
    resources = SharedResources(Settings(), [], [], None)
    try:
        resources.create_arenas()
        resources.create_rings()
        process = psutil.Process()
        gc.collect()  # descriptors of earlier tests' garbage
        num_fds = process.num_fds()
        names = ["ingest.1", "detokenize.1", "gateway.1"]
        for name in names:
            resources.add(name)
            resources.launch(topology.stage_of(name), "", [], 1) if name != "gateway.1" else None
        rings = {(one.peer, one.sends) for one in resources._rings_between("detokenize.1", "gateway.1")}
        assert rings == {("gateway.1", True)}, "both are new"
        found = resources.restart_of("ingest.1", "gateway.0", 7)
        assert found is not None and found[0].peer.address and found[0].segment is not None
        for name in names[::-1]:
            resources.remove(name)
        left = {"execute.0", "ingest.0", "schedule.0", topology.KV_INDEX, topology.STATE_INDEX}
        assert process.num_fds() == num_fds and set(resources.segments) == left
        found = resources.restart_of("ingest.1", "gateway.0", 8)
        assert found is not None and found[0].is_removed and found[0].incarnation == 1 and not found[1]
        assert resources.launch("schedule", "", []).incarnations["ingest.1"] == 2, "late messages of it count as old"
        resources.add("ingest.1")
        assert resources.incarnations["ingest.1"] == 3
    finally:
        resources.close()


def test_pairs_get_rings_while_there_are_few() -> None:
    names = ["schedule.0", "execute.0", *(f"detokenize.{i}" for i in range(4)), *(f"gateway.{i}" for i in range(4))]
    pairs = topology.rings_among(names)
    assert pairs.count(("detokenize.3", "gateway.3")) == (1 if pairs else 0)
    among_more = topology.rings_among([*names, "gateway.4"])
    assert not any(one.startswith("detokenize.") and other.startswith("gateway.") for one, other in among_more)
