"""The checker process, with checks of our own."""

import os
import signal
import socket
import threading
import time
from typing import Any

import msgspec
import pytest

from pipeline.grammars import checker
from pipeline.grammars.checks import Check, Checked
from pipeline.runtime.workers import forked_jobs
from pipeline.runtime.workers.worker import WorkerLostError, receive, send

TIMEOUT_S = 0.4
PATIENCE_S = 60.0


def burn(cpu_s: float) -> None:
    while time.process_time() < cpu_s:
        pass


def answer(monkeypatch: pytest.MonkeyPatch, check: Any) -> Checked:
    """What the process answers to `check`, which runs in a child."""
    monkeypatch.setattr(checker, "checked", check)
    ours, theirs = socket.socketpair()
    ours.settimeout(PATIENCE_S)

    def serve() -> None:
        with theirs, pytest.raises(WorkerLostError):
            checker.Checker(theirs, object(), "", TIMEOUT_S).loop()  # type: ignore[arg-type]

    thread = threading.Thread(target=serve)
    thread.start()
    with ours:
        send(ours, msgspec.msgpack.encode(Check(7, "regex", "a", time.monotonic())))
        found = msgspec.msgpack.decode(receive(ours), type=Checked)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    return found


@pytest.mark.parametrize("cpu_s", [0.0, 0.07])
def test_a_check_that_got_little_cpu_time_is_given_more(monkeypatch: pytest.MonkeyPatch, cpu_s: float) -> None:
    """The machine is busy, and the grammar may be fine. A quarter of the time limit is 0.09 s; a check that had less
    said nothing, and one with more than `MIN_CPU_S` was given no more time: between them, clients got 503."""
    monkeypatch.setattr(forked_jobs, "MIN_CPU_S", 0.05)

    def starved(check: Check, engine: Any) -> Checked:
        burn(time.process_time() + cpu_s)
        time.sleep(TIMEOUT_S + 0.2)
        return Checked(check.number, grammar="good")

    assert answer(monkeypatch, starved).grammar == "good"


def test_a_check_that_gets_no_cpu_time_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an error that is not kept: it says nothing about the grammar."""
    monkeypatch.setattr(forked_jobs.ForkedJobs.__init__, "__defaults__", (3 * TIMEOUT_S,))
    found = answer(monkeypatch, lambda *_: time.sleep(PATIENCE_S))
    assert (found.error, found.is_final) == (f"it is too complex: checking it takes longer than {TIMEOUT_S} s", False)


@pytest.mark.parametrize(
    ("number", "words", "is_final"),
    [
        (signal.SIGABRT, "checking it ends with SIGABRT: it takes too much memory, or is nested too deeply", True),
        (signal.SIGKILL, "checking it ends with SIGKILL: it takes too much memory, or is nested too deeply", False),
    ],
)
def test_the_error_of_a_check_names_the_signal_that_ended_it(
    number: signal.Signals, words: str, is_final: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL is for want of memory on the machine, and says nothing of the grammar."""
    found = answer(monkeypatch, lambda *_: os.kill(os.getpid(), number))
    assert (found.error, found.is_final) == (words, is_final)


def test_a_check_without_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(*_: Any) -> Checked:
        raise MemoryError

    assert answer(monkeypatch, lacks).error == "it is too complex: checking it takes too much memory"
