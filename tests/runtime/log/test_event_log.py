"""Frequent events get one log line a second at most, and none is lost."""

import logging
from typing import Any

import pytest

from pipeline.runtime.log.event_log import EventLog


def test_events_of_a_second_share_a_line(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 50.0
    events = EventLog(logging.getLogger("tests.events"), "refused", lambda: now_s)

    def lines() -> list[dict[str, Any]]:
        found = [vars(record)["fields"] for record in caplog.records]
        caplog.clear()
        return found

    events.update(0)
    assert lines() == []
    events.update(1, why="a")
    for total in range(2, 1000):
        events.update(total, why="b")
    assert lines() == [{"num": 1, "why": "a"}]
    now_s += 0.9
    events.update(1000, why="c")
    assert lines() == []
    now_s += 0.1
    events.update(1000, why="c")  # a heartbeat
    events.update(1000, why="c")
    assert lines() == [{"num": 999, "why": "c"}]
    now_s += 5.0
    events.update(1000, why="c")
    assert lines() == []


def test_events_that_nothing_else_counts_are_logged_with_the_newest_fields(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 50.0
    events = EventLog(logging.getLogger("tests.events"), "refused", lambda: now_s)
    events.flush()
    for num, why in ((1, "a"), (2, "b"), (3, "c")):
        events.add(num, why=why)
    events.flush()
    now_s += 1.0
    events.flush()
    events.flush()
    assert [vars(record)["fields"] for record in caplog.records] == [{"num": 1, "why": "a"}, {"num": 5, "why": "c"}]
