"""Log lines of an embedded server, as shown to the process that started it."""

import logging
import sys
from typing import Any

import pytest

from pipeline.client.embedded import server_log
from pipeline.runtime.log.logs import JsonFormatter, KeyValueFormatter


def lines(form: str, *events: tuple[int, str, str, dict[str, Any]]) -> str:
    """A log in the format of the stages."""
    written = []
    for level, stage, text, fields in events:
        formatter = KeyValueFormatter(stage) if form == "text" else JsonFormatter(stage)
        record = logging.LogRecord("pipeline", level, "", 0, text, None, None)
        record.fields = fields
        written.append(formatter.format(record))
    return "\n".join(written) + "\n"


@pytest.mark.parametrize("form", ["text", "json"])
def test_both_log_formats_are_read(form: str) -> None:
    log = lines(
        form,
        (logging.INFO, "supervisor.0", "starting", {"model": "a b"}),
        (logging.ERROR, "execute.0", "failed", {}),
        (logging.ERROR, "supervisor.0", "cannot start: execute: no memory", {}),
        (logging.INFO, "supervisor.0", "ready on http://127.0.0.1:123", {"model": "m"}),
        (logging.ERROR, "supervisor.0", "gateway.0 died: was killed", {}),
    )
    assert server_log.errors(log) == "cannot start: execute: no memory; gateway.0 died: was killed"
    assert server_log.http_address(log) == "http://127.0.0.1:123"
    assert server_log.last_message(log) == "gateway.0 died: was killed"


def test_a_line_that_is_no_event_is_shown_unchanged() -> None:
    assert server_log.last_message("") == ""
    assert server_log.last_message("downloading: 3.0 MB of 9.0 MB\n\n") == "downloading: 3.0 MB of 9.0 MB"
    assert server_log.last_message('{"not": "ours"}\n') == '{"not": "ours"}'
    assert server_log.last_message("{not json\n") == "{not json"
    assert server_log.errors("Traceback …\nValueError: x\n") == ""
    assert server_log.errors("pipeline: error: cannot listen on x\n") == "cannot listen on x"
    assert server_log.http_address("starting\n") is None


def test_a_missing_standard_error_does_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.client.progress import is_seen

    monkeypatch.setattr(sys, "stderr", None)
    assert not is_seen(True)
