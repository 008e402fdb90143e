"""The pure parts of tools/soak/turns: how long a stream may wait, which prompt tokens may be computed twice, and whose
memory counts."""

import os
import time
from typing import Any

import psutil
import pytest

from tools.soak.turns.pauses import Event, Wait, events_of, fair_s, late_of
from tools.soak.turns.server import metric_of
from tools.soak.turns.watch import Watch, memory_of

LOG = """10:00:01.500 I supervisor.0@one asleep saved=12KiB step_s=0.10 save_s=0.10 end_s=0.05 took_s=0.25
10:00:02.000 I supervisor.0@two execute.0 is back pid=7 restarts=1 took_s=0.40
10:00:02.001 I supervisor.0@two awake took_s=0.45
10:00:02.500 I supervisor.0 unloaded model=three took_s=9.00
"""


def at(hour: int, minute: int, second: float) -> float:
    """A Unix time of a day of local time."""
    return time.mktime((2026, 3, 4, hour, minute, 0, 0, 0, -1)) + second


def test_events_are_sleeps_wakes_and_restarts_of_models() -> None:
    begin_s = 10 * 3600.0
    approx: Any = pytest.approx
    assert events_of(LOG) == [
        Event(approx(begin_s + 1.5), 0.25),
        Event(approx(begin_s + 2.0), 0.4),
        Event(approx(begin_s + 2.001), 0.45),
    ]


def test_a_wait_is_fair_up_to_the_quanta_of_others_and_what_happened_meanwhile() -> None:
    events = events_of(LOG)
    assert fair_s(Wait(at(10, 0, 1), at(10, 0, 2.2), "one"), events, 3, 3.0) == pytest.approx(6 + 1.1)
    assert fair_s(Wait(at(10, 0, 1.9), at(10, 0, 2.2), "one"), events, 3, 3.0) == pytest.approx(6 + 0.85)
    assert fair_s(Wait(at(10, 0, 3), at(10, 0, 9), "one"), events, 2, 3.0) == 3


def test_a_wait_over_midnight_has_the_events_after_it() -> None:
    events = events_of(LOG.replace("10:00", "00:00"))
    assert fair_s(Wait(at(23, 59, 59), at(23, 59, 59) + 3, "one"), events, 3, 1.0) == pytest.approx(2 + 0.65)


def test_a_wait_is_late_beyond_the_slack() -> None:
    waits = [Wait(at(10, 1, 0), at(10, 1, 0) + seconds, "one") for seconds in (6.9, 7.5)]
    ((late, over_s),) = late_of(waits, [], 3, 3.0, 1.0)
    assert late == waits[1] and over_s == pytest.approx(1.5, abs=0.001)


def test_the_values_of_a_metric_are_by_model() -> None:
    text = '# HELP a\na{model_name="one"} 3.0\na{model_name="two"} 0\nab{model_name="one"} 7\n'
    assert metric_of(text, "a") == {"one": 3.0, "two": 0.0}


def test_prompt_tokens_computed_twice_are_a_fault_unless_a_stage_was_killed() -> None:
    watch = Watch(None, 0)  # type: ignore[arg-type]  # not entered: it asks nothing
    watch.see({"one": 0, "two": 0}, {"one": 1, "two": 1})
    watch.killed("execute", "one")
    watch.killed("ingest", "two")
    watch.see({"one": 5, "two": 0}, {"one": 2, "two": 1})
    assert not watch.faults and watch.num_recomputed == 5
    watch.see({"one": 5, "two": 3}, {"one": 2, "two": 1})
    assert list(watch.faults) == ["two: 3 prompt tokens were computed twice, and no stage had been killed"]
    watch.see({"one": 7, "two": 3}, {"one": 4, "two": 1})  # its turns since the kill are over
    assert "one: 2 prompt tokens were computed twice, and no stage had been killed" in watch.faults


def test_a_schedule_that_was_killed_counts_from_0_again() -> None:
    watch = Watch(None, 0)  # type: ignore[arg-type]
    watch.see({"one": 9}, {"one": 1})
    watch.faults.clear()
    watch.see({"one": 0}, {"one": 1})
    assert not watch.faults


def test_a_segment_counts_once_however_many_have_it_open_and_none_has_it_mapped() -> None:
    own = psutil.Process()
    before = memory_of([own])
    fd = os.memfd_create("test")
    again = os.dup(fd)
    try:
        os.posix_fallocate(fd, 0, 32 << 20)
        assert memory_of([own, own])["Pss_Shmem"] - before["Pss_Shmem"] >= 16 << 20
        assert memory_of([own])["Pss_Shmem"] - before["Pss_Shmem"] < 40 << 20
    finally:
        os.close(fd)
        os.close(again)
