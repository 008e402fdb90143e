"""Restarts as spans of a trace."""

import time

import pytest

from pipeline.supervisor.restart import restart_log
from pipeline.supervisor.restart.restart_log import RestartLog


def test_a_span_lasts_until_the_stage_is_back() -> None:
    log, begin_s = RestartLog(), time.monotonic()
    log.begin("execute.0", "died", reason="was killed by SIGKILL")
    (still_open,) = log.trace(begin_s).records
    assert still_open.args["is_over"] == 0
    log.end("execute.0", restarts=1)
    log.end("execute.0", restarts=2)
    (span,) = log.trace(begin_s).records
    assert span.name == "execute.0 died"
    assert begin_s <= span.begin_s <= span.end_s <= time.monotonic()
    assert span.args == {"reason": "was killed by SIGKILL", "took_s": span.args["took_s"], "restarts": 1}
    assert log.trace(time.monotonic()).records == []


def test_a_second_death_ends_the_span_of_the_first() -> None:
    log = RestartLog()
    log.begin("execute.0", "died", pid=1)
    log.begin("schedule.0", "restarts", pid=2)
    log.begin("execute.0", "died", pid=3)
    spans = log.trace(0.0).records
    assert [span.args["pid"] for span in spans] == [1, 2, 3]
    assert ["is_over" in span.args for span in spans] == [False, True, True]


def test_the_oldest_spans_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    log = RestartLog()
    for pid in range(restart_log.MAX_SPANS + 3):
        log.begin("ingest.0", "died", pid=pid)
        log.end("ingest.0")
    assert [span.args["pid"] for span in log.trace(0.0).records] == list(range(3, restart_log.MAX_SPANS + 3))
