"""Of each kind of line, a few are written in a second; the others are counted."""

import logging

import pytest

from pipeline.runtime.log.limited_log import INTERVAL_S, MAX_LINES, LimitedLog


def test_lines_beyond_the_limit_are_counted_by_kind(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 50.0
    log = LimitedLog(logging.getLogger("tests.limited"), lambda: now_s)

    def lines() -> list[tuple[str, object]]:
        found = [(record.getMessage(), vars(record)["fields"]) for record in caplog.records]
        caplog.clear()
        return found

    with caplog.at_level(logging.INFO):
        for number in range(MAX_LINES + 3):
            log.info("aborted", number=number)
        log.log(logging.WARNING, "failed", number=0)
        each: list[tuple[str, object]] = [("aborted", {"number": number}) for number in range(MAX_LINES)]
        assert lines() == [*each, ("failed", {"number": 0})]
        log.flush()
        assert lines() == []
        now_s += INTERVAL_S
        log.flush()
        assert lines() == [("left out lines: aborted", {"num": 3})]
        log.info("aborted", number=99)
        assert lines() == [("aborted", {"number": 99})]
        now_s += INTERVAL_S
        log.flush()
        assert lines() == []
