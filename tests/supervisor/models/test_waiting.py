"""A model that can't wake waits longer and longer between its tries, and others have their turns meanwhile."""

import logging
import math
import time
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.config.by_device import kv_bytes_in_ram
from pipeline.config.settings import Settings
from pipeline.supervisor.models import waiting
from pipeline.supervisor.models.manager import ModelManager
from pipeline.supervisor.models.memory import PROCESSES_BYTES, SLEEPING_BYTES
from pipeline.supervisor.models.model_thread import ManagedModel
from pipeline.supervisor.models.waiting import PAUSES_S, WaitingModels
from pipeline.supervisor.stopping import EXIT_OK

MIB = 1 << 20


class Thread:
    """A model's thread that notes what it is asked for."""

    is_asleep = False

    def __init__(self) -> None:
        self.asked: list[str] = []

    def set_turn(self, sleeps: bool) -> None:
        self.asked.append("sleep" if sleeps else "wake")


class Bench:
    """Two models of which one fits, `a` asleep with open requests; and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(waiting, "time", self)
        self.threads = {name: Thread() for name in "ab"}
        self.models = {
            name: ManagedModel(name, Settings(), "loaded", num_bytes=1000 * MIB, is_busy=True) for name in "ab"
        }
        for name, model in self.models.items():
            thread: Any = self.threads[name]
            model.thread = thread
        self.models["a"].turn = "asleep"
        self.loaded: list[str] = []
        self.waiting = WaitingModels(
            *(self.models, 2400 * MIB, 10.0),
            lambda model: self.loaded.append(model.name),
            lambda model: None,
            lambda model, problem: None,
            logging.getLogger("test"),
        )

    def monotonic(self) -> float:
        return self.now_s

    def time(self) -> float:
        return time.time()

    def turn(self, seconds: float = 0.0) -> list[str]:
        """Time passes. Returns what `a` is asked for."""
        self.now_s += seconds
        self.threads["a"].asked.clear()
        self.waiting.turn()
        return self.threads["a"].asked

    def fail(self) -> None:
        self.waiting.happened(self.models["a"], "not awake", 0)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    one = Bench(monkeypatch)
    one.models["b"].state = "unloaded"
    one.waiting.want(one.models["a"])
    return one


def test_a_model_that_can_not_wake_is_woken_again_after_a_pause_that_grows(bench: Bench) -> None:
    assert bench.turn() == ["wake"]
    for pause_s in (*PAUSES_S, PAUSES_S[-1]):
        bench.fail()
        assert bench.turn() == [] and bench.waiting.due_s == bench.now_s + pause_s
        assert bench.waiting.position("a") == 1
        assert bench.turn(pause_s - 0.01) == []
        assert bench.turn(0.01) == ["wake"]
        assert bench.waiting.due_s == math.inf


def test_the_pause_is_the_first_one_again_once_it_was_awake(bench: Bench) -> None:
    for _ in range(3):
        bench.turn(60.0)
        bench.fail()
    bench.turn(60.0)
    bench.waiting.happened(bench.models["a"], "awake", 0)
    bench.waiting.happened(bench.models["a"], "asleep", 0)
    assert bench.turn() == ["wake"]
    bench.fail()
    assert bench.turn(PAUSES_S[0]) == ["wake"]


def test_a_model_that_can_not_sleep_is_put_to_sleep_again_after_a_pause_that_grows(bench: Bench) -> None:
    bench.waiting._memory_bytes = 1800 * MIB  # of one, while the other sleeps
    bench.waiting.drop("a")
    bench.models["a"].turn, bench.models["a"].awake_since_s = "awake", bench.now_s - 10.0
    bench.waiting.want(bench.models["b"])
    assert bench.turn() == ["sleep"]
    for pause_s in (10.0, 10.0, 10.0, 15.0, 30.0, 30.0):  # at least the quantum
        bench.waiting.happened(bench.models["a"], "not asleep", 0)
        assert bench.turn() == [] and bench.waiting.due_s == bench.now_s + pause_s
        assert bench.turn(pause_s - 0.5) == []
        assert bench.turn(0.5) == ["sleep"]
    bench.waiting.happened(bench.models["a"], "asleep", 0)
    bench.models["a"].turn = "awake"
    bench.waiting.happened(bench.models["a"], "not asleep", 0)
    assert bench.turn() == [] and bench.waiting.due_s == bench.now_s + 10.0, "the pause is the first one again"


def test_another_model_is_loaded_during_the_pause(bench: Bench) -> None:
    bench.turn()
    bench.fail()
    bench.waiting.want(bench.models["b"])
    assert bench.turn() == [] and bench.loaded == ["b"]


def test_a_model_that_sleeps_keeps_its_processes_and_what_it_has_saved(bench: Bench) -> None:
    one = bench.models["b"]
    kv_bytes = kv_bytes_in_ram(one.settings)
    assert one.stays_bytes == PROCESSES_BYTES + one.settings.execute.swap_bytes + kv_bytes, "before it is prepared"
    one.asleep_bytes = processes = SLEEPING_BYTES + 40 * MIB
    one.turn = "falling asleep"
    assert one.stays_bytes == processes + one.settings.execute.swap_bytes + kv_bytes
    bench.waiting.happened(one, "asleep", 7 * MIB)
    assert one.stays_bytes == processes + one.settings.execute.swap_bytes + 7 * MIB


def test_a_model_that_was_unloaded_while_requests_waited_for_it_is_still_busy() -> None:
    """The gateway reports changes only: it has reported these requests before, and they wait until it is loaded."""
    manager = object.__new__(ModelManager)
    manager._starting, manager._log = "", logging.getLogger("test")
    thread: Any = SimpleNamespace(join=lambda: None)
    model = ManagedModel("a", Settings(), "unloading", is_busy=True, thread=thread, turn="waking")
    manager._ended(model, EXIT_OK)
    assert (model.state, model.turn, model.thread) == ("unloaded", "awake", None)
    assert model.is_busy


@pytest.mark.parametrize(("small_mib", "loads"), [(300, ["c"]), (500, [])])
def test_a_model_that_fits_beside_is_loaded_before_one_that_waits_open_endedly(
    monkeypatch: pytest.MonkeyPatch, small_mib: int, loads: list[str]
) -> None:
    """`b` waits for the requests of `a`, which can't sleep; `c` fits beside either, or only beside `a`."""
    one = Bench(monkeypatch)
    one.models["a"].turn = "awake"
    one.waiting._quantum_s = 0.0
    one.models["b"].state, one.models["b"].num_bytes = "unloaded", 2000 * MIB
    one.models["c"] = ManagedModel("c", Settings(), "unloaded", num_bytes=small_mib * MIB, is_busy=True)
    for name in "bc":
        one.waiting.want(one.models[name])
    one.turn()
    assert one.waiting.waits_for("b") == ("a",)
    assert one.loaded == loads


@pytest.mark.parametrize("quantum_s", [0.0, 10.0])
def test_the_log_says_once_why_a_model_takes_no_turns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, quantum_s: float
) -> None:
    one = Bench(monkeypatch)
    one.models["a"].turn = "awake"
    one.waiting._quantum_s, one.waiting._memory_bytes = quantum_s, 1200 * MIB
    one.models["b"].state = "unloaded"
    one.waiting.want(one.models["b"])
    with caplog.at_level(logging.INFO):
        one.turn()
        one.turn()
    fields = {"model": "b", "after": "a"}
    if quantum_s:  # each of them while the other sleeps with all of its KV cache
        fields |= {"turns_need": "1704MiB", "memory_bytes": "1200MiB"}
    assert [record.__dict__["fields"] for record in caplog.records] == [fields]
    one.waiting.drop("b")
    one.waiting.want(one.models["b"])
    with caplog.at_level(logging.INFO):
        one.turn()
    assert len(caplog.records) == 2
