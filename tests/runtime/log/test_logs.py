"""Log lines, as text and as JSON."""

import json
import logging
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from pipeline.runtime.log.logs import open_log


@pytest.fixture(autouse=True)
def restored_log() -> Iterator[None]:
    log = logging.getLogger("pipeline")
    root = logging.getLogger()
    before, root_before = (log.handlers, log.level, log.propagate), root.handlers
    yield
    log.handlers, log.level, log.propagate = before
    root.handlers = root_before
    logging.captureWarnings(False)


def lines(capsys: pytest.CaptureFixture[str]) -> list[Any]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_a_json_line_has_time_stage_message_and_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    open_log("schedule.0", "info", "json").info("admitted", extra={"fields": {"request": "1f3a", "prompt": 128}})
    [line] = lines(capsys)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("ts"))
    assert line.pop("pid") > 0
    assert line == {"level": "info", "stage": "schedule.0", "message": "admitted", "request": "1f3a", "prompt": 128}


def test_a_line_with_any_field_value_parses(capsys: pytest.CaptureFixture[str]) -> None:
    log = open_log("x.0", "info", "json")
    circle: list[Any] = []
    circle.append(circle)
    odd: list[Any] = [
        object(),
        {1: 2},
        b"\xff",
        'two\nlines "quoted"',
        "half \ud800",
        float("nan"),
        2**70,
        circle,
        {3, 4},
    ]
    for value in odd:
        log.info("odd", extra={"fields": {"value": value}})
    log.info("half a character: \udfff")
    read = lines(capsys)
    assert len(read) == len(odd) + 1
    assert read[3]["value"] == 'two\nlines "quoted"'


def test_a_field_cannot_override_the_line_s_own(capsys: pytest.CaptureFixture[str]) -> None:
    open_log("x.0", "info", "json").info("real", extra={"fields": {"message": "forged", "stage": "y.0"}})
    [line] = lines(capsys)
    assert (line["message"], line["stage"]) == ("real", "x.0")
    assert (line["message_"], line["stage_"]) == ("forged", "y.0")


def test_a_traceback_is_one_field_of_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    log = open_log("x.0", "info", "json")
    try:
        raise ValueError("no")
    except ValueError:
        log.exception("failed")
    [line] = lines(capsys)
    assert line["level"] == "error"
    assert line["exception"].endswith("ValueError: no")


def test_log_lines_of_libraries_are_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    open_log("x.0", "info", "json")
    logging.getLogger("asyncio").warning("Executing took %s", 0.2)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    output = lines(capsys)
    assert [(line["level"], line["stage"]) for line in output] == [("warning", "x.0")] * 2
    assert output[0]["message"] == "Executing took 0.2"
    assert "DeprecationWarning: old" in output[1]["message"]


def test_text_lines_have_the_fields_as_key_value(capsys: pytest.CaptureFixture[str]) -> None:
    open_log("x.0", "info").info("admitted", extra={"fields": {"request": "1f", "why": "two words"}})
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} I x\.0 admitted request=1f why='two words'\n", capsys.readouterr().err)
