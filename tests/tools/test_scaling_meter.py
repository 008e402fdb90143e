"""The meter of growing work: it covers all parsers, finds what is too slow, and a part of it runs here."""

import json
import time
from collections.abc import Callable

import pytest

from pipeline.stages.gateway.http.routes import ROUTES
from pipeline.text.formats.chat_formats import GENERIC, TOOL_FORMATS
from pipeline.text.formats.reasoning import FORMATS as REASONING_FORMATS
from tools.scaling_meter import bodies, measure, replies, schemas, table
from tools.scaling_meter.__main__ import WIDTH, main, report
from tools.scaling_meter.case import Case

MAX_BYTES = 16 * 1024
EVERY = 397
"""Of the cases of bodies, formats, grammars and tokenizers, one in so many runs here; all others do."""
STRIDED = ("/", "tool format", "reasoning format", "grammar of", "tokenizer")


def busy(cpu_s: float) -> None:
    end_s = time.process_time() + cpu_s
    while time.process_time() < end_s:
        pass


def case(work: Callable[[int], object], **more: float) -> Case:
    options = {"max_n": 4096, **more}
    return Case("test", "case", lambda n: lambda: work(n), **options)  # type: ignore[arg-type]


class TestCoverage:
    def test_every_route_with_a_body_has_cases(self) -> None:
        paths = {route.path for route in ROUTES if route.body is not None}
        assert paths == set(bodies.PARSERS) | set(bodies.SAME), "add it to PARSERS in tools/scaling_meter/bodies.py"
        assert set(bodies.SAME.values()) <= set(bodies.PARSERS)

    def test_every_body_is_read(self) -> None:
        for parse, body in bodies.PARSERS.values():
            parse(json.dumps(body).encode(), bodies.LIMITS)

    def test_every_format_has_cases(self) -> None:
        groups = {one.group for one in (*replies.cases(), *schemas.cases())}
        for form in (*TOOL_FORMATS, GENERIC):
            assert {f"tool format {form.name}", f"grammar of {form.name}"} <= groups
        assert {f"reasoning format {one.name}" for one in REASONING_FORMATS} <= groups

    def test_names_are_unique_in_a_group(self) -> None:
        titles = [one.title for one in table.all_cases() if not one.group.startswith("/")]
        assert len(titles) == len(set(titles))


class TestMeasure:
    def test_linear_work_passes(self) -> None:
        result = measure.measure(case(lambda n: busy(n * 2e-6)))
        assert not result.problem and len(result.samples) > 2

    def test_quadratic_work_fails(self) -> None:
        assert "grows as n^2" in measure.measure(case(lambda n: busy(n * n * 1e-9), max_n=8192)).problem

    def test_slow_work_fails(self) -> None:
        assert "the bound is 5 ms" in measure.measure(case(lambda n: busy(n * 5e-6), bound_ms=5.0)).problem

    def test_work_without_an_end_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(measure, "ENDLESS_S", 0.05)
        assert "more than 0.05 s" in measure.measure(case(lambda n: busy(60.0))).problem

    def test_errors_fail(self) -> None:
        assert measure.measure(case(lambda n: 1 // 0)).problem.startswith("ZeroDivisionError")


class TestCommand:
    def test_the_table_fits_a_terminal(self, capsys: pytest.CaptureFixture[str]) -> None:
        slow = case(lambda n: busy(n * 5e-6), bound_ms=1.0)
        assert report([case(lambda n: None), slow], with_all=True) == 1
        text = capsys.readouterr().out
        assert "FAILS" in text and "2 cases" in text
        assert max(map(len, text.splitlines())) <= WIDTH + 1

    def test_names_select_cases(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--only", "keep_alive", "--list"]) == 0
        assert "/api/chat keep_alive" in capsys.readouterr().out
        assert main(["--only", "no such case"]) == 2


def test_work_grows_no_faster_than_its_input() -> None:
    cases = list(table.all_cases())
    few = [one for one in cases if not one.group.startswith(STRIDED)]
    few += [one for one in cases if one.group.startswith(STRIDED)][::EVERY]
    few += [
        one
        for one in cases
        if one.group.startswith("/api/chat") and ("keep_alive" in one.name or "results" in one.name)
    ]
    problems = {one.title: result.problem for one in few if (result := measure.measure(one, MAX_BYTES)).problem}
    assert not problems
