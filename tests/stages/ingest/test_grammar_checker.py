"""Grammars of requests: checked outside of the loop, cached, and rejected with errors that name the field."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from pipeline.config.settings import LimitSettings, Settings
from pipeline.grammars.checks import Checked
from pipeline.runtime import messages as m
from pipeline.runtime.process import suspension
from pipeline.runtime.workers.job_dispatcher import MakeJob
from pipeline.stages.ingest import grammar_checker
from pipeline.stages.ingest.grammar_checker import GrammarChecker
from pipeline.stages.ingest.prompts.rejection import RequestRejected
from pipeline.text.formats.grammar.lark import LarkBuilder
from tests.rig import Rig
from tests.stages.execute.grammar_masks.test_masks import DEEP, ENDLESS
from tests.stages.ingest import models as tiny


@pytest.fixture
async def grammars(tmp_path: Path) -> AsyncIterator[GrammarChecker]:
    grammars = GrammarChecker(tiny.folder(tmp_path), LimitSettings())
    yield grammars
    grammars.close()


async def rejected(grammars: GrammarChecker, kind: str, source: Any) -> m.Failure:
    text = source if isinstance(source, str) else json.dumps(source)
    with pytest.raises(RequestRejected) as caught:
        await grammars.check(m.Grammar(kind, text, "guided"))
    assert caught.value.failure.param == "guided"
    return caught.value.failure


GOOD = [
    ("json_object", ""),
    ("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}'),
    ("json_schema", "true"),
    ("closed_schema", "true"),
    ("regex", "^[a-z]+@x\\.(com|org)$"),
    ("choice", '["yes", "no", "ä\\n\\"\\u007f\\u0000", ""]'),
    ("grammar", 'start: "a" | "b" start'),
    ("grammar", 'root ::= "a" | "b" root'),
    (
        "structural_tag",
        '{"type": "structural_tag", "structures": [{"begin": "<f=a>", "schema": {"type": "object"}, "end": "</f>"}], '
        '"triggers": ["<f="]}',
    ),
]


async def test_valid_grammars_are_accepted(grammars: GrammarChecker) -> None:
    for kind, source in GOOD:
        assert await grammars.check(m.Grammar(kind, source))


async def test_several_checks_may_arrive_before_the_process_starts(grammars: GrammarChecker) -> None:
    checked = await asyncio.gather(*(grammars.check(m.Grammar("regex", f"a{{{i}}}")) for i in range(1, 9)))
    assert len(set(checked)) == 8


async def test_a_check_during_which_all_processes_were_suspended_is_repeated(
    grammars: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatcher, num_queries = grammars._dispatcher, 0
    really = dispatcher._query

    async def query(scope: str, cost: int, make_job: MakeJob) -> Checked:
        nonlocal num_queries
        num_queries += 1
        if num_queries == 1:
            monkeypatch.setattr(dispatcher, "_wait_s", 60.0)
            await asyncio.Event().wait()
        return await really(scope, cost, make_job)

    monkeypatch.setattr(dispatcher, "_wait_s", 0.01)
    monkeypatch.setattr(suspension, "missed", lambda due_s: True)
    monkeypatch.setattr(dispatcher, "_query", query)
    await grammars.check(m.Grammar("regex", "[ab]+"))
    assert num_queries == 2


async def test_a_cancelled_check_stops_no_other_check(grammars: GrammarChecker) -> None:
    first = asyncio.create_task(grammars.check(m.Grammar("regex", "a")))
    second = asyncio.create_task(grammars.check(m.Grammar("regex", "b")))
    await asyncio.sleep(0)  # both have started
    first.cancel()
    assert await second
    with pytest.raises(asyncio.CancelledError):
        await first


BAD = [
    ("json_schema", "{", "not valid JSON"),
    ("closed_schema", "{", "not valid JSON"),
    ("closed_schema", '{"properties": {"\\ud800": {}}}', ""),
    ("closed_schema", '{"a":' * 5000 + "1" + "}" * 5000, "nested too deeply"),
    ("json_schema", "[]", "an array"),
    ("json_schema", '{"minimum": NaN}', "NaN"),
    ("json_schema", '{"minimum": 1e400}', '"minimum" has the number 1e400'),
    ("json_schema", '{"not": {}}', '"not"'),
    ("json_schema", '{"type": "string", "format": 9}', "format"),
    ("json_schema", '{"properties": {"a": {"type": "string", "maxlength": 9}}}', 'did you mean "maxLength"'),
    ("json_schema", '{"oneOf": [{"type": "string"}, {"minLength": 3}]}', '"oneOf"'),
    ("json_schema", '{"$ref": "#"}', "no text matches"),
    ("json_schema", '{"$ref": "https://example.org/schema"}', "example.org"),
    ("json_schema", "false", "schema is false"),
    ("json_schema", '{"x-guidance": {"lenient": true}, "not": {}}', "x-guidance"),
    ("json_schema", '{"minProperties": 2}', "minProperties"),
    ("json_schema", '{"const": "a\\u0000"}', "control characters"),
    ("json_schema", '{"type": "string", "pattern": "(?=a)b"}', "look-around"),
    ("json_schema", '{"a":' * 5000 + "1" + "}" * 5000, "nested too deeply"),
    ("regex", "(", "unclosed group"),
    ("regex", "a(?!b)", "look-around"),
    ("regex", "\ud800", "surrogate"),
    ("choice", "[]", "list of choices is empty"),
    ("choice", '["a", 1]', "array of strings"),
    ("choice", '["\\ud800"]', "surrogate"),
    ("grammar", "", "empty"),
    ("grammar", "root ::= nowhere", "nowhere"),
    ("grammar", "start: nowhere", "nowhere"),
    ("structural_tag", "{}", "triggers"),
    ("structural_tag", '{"format": {}}', "format"),
    ("structural_tag", '{"structures": [{"begin": "a", "schema": {}, "end": ""}], "triggers": ["b"]}', "structures[0]"),
    ("structural_tag", '{"structures": [{"begin": "a", "schema": {"not": {}}}], "triggers": ["a"]}', '"not"'),
    ("sonnet", "", "sonnet"),
]


async def test_an_invalid_grammar_is_a_400_with_the_reason(grammars: GrammarChecker) -> None:
    for kind, source, part in BAD:
        failure = await rejected(grammars, kind, source)
        assert (failure.status, failure.code) == (400, "invalid_grammar")
        assert part in failure.message and len(failure.message) < 600, (kind, source, failure.message)


async def test_the_tool_with_an_invalid_schema_is_named(grammars: GrammarChecker) -> None:
    good, bad = (
        {"type": "object"},
        {"type": "object", "properties": {"a": {"minItems": 2, "maxItems": 1, "not": {"type": "null"}}}},
    )
    lark = LarkBuilder("", {})
    start = lark.one_of([lark.schema(json.dumps(schema)) for schema in (good, bad)])
    source = msgspec.json.encode(lark.grammar(start)).decode()
    with pytest.raises(RequestRejected) as alone:
        await grammars.check(m.Grammar("closed_schema", json.dumps(bad), "response_format"))
    for param, expected_param in (
        ("tools", "tools[1].function.parameters"),
        ("tools[5].function.parameters", "tools[5].function.parameters"),  # the client named it
        ("tools", "tools[1].function.parameters"),  # cached by now
    ):
        with pytest.raises(RequestRejected) as caught:
            await grammars.check(m.Grammar("calls", source, param))
        failure = caught.value.failure
        assert (failure.status, failure.param, failure.code) == (400, expected_param, "invalid_grammar")
        why = alone.value.failure.message.removeprefix("the schema ")
        assert failure.message == f"the schema of {expected_param.partition('.')[0]} {why}"


HOSTILE = {
    "endless": ("grammar", ENDLESS),
    "deep": ("grammar", DEEP[:100_000] + '\nr99999: "x"\n'),
    "multiple": ("json_schema", {"type": "integer", "multipleOf": 99999989}),
    "branches": (
        "json_schema",
        {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(9)]} for i in range(9)]},
    ),
    "huge": ("json_schema", {"enum": ["x" * 1000] * 1000}),
    "many": ("choice", [str(i) for i in range(20_000)]),
    "parentheses": ("regex", "(" * 30_000 + "a" + ")" * 30_000),
}


MAX_CHECK_CPU_S = 2.0
"""A check may take a second. On a busy machine, one that got less than a quarter of that by then gets a second more."""


async def test_hostile_grammars_are_rejected_in_time(grammars: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    """By CPU time, which other processes do not change; tests/grammars/test_checker.py has how long it may last."""
    answers: list[Checked] = []
    really = grammars._dispatcher.query

    async def query(scope: str, cost: int, make_job: MakeJob) -> Checked:
        answers.append(await really(scope, cost, make_job))
        return answers[-1]

    monkeypatch.setattr(grammars._dispatcher, "query", query)
    for name, (kind, source) in HOSTILE.items():
        failure = await rejected(grammars, kind, source)
        answer = answers.pop() if answers else Checked(0)  # it has too many bytes
        # On a busy machine, a timeout does not mean that the grammar is bad.
        assert failure.status == (400 if answer.is_final else 503), name
        assert answer.took_s < MAX_CHECK_CPU_S, name


async def test_hostile_grammars_do_not_delay_others(grammars: GrammarChecker) -> None:
    await grammars.check(m.Grammar("json_object"))
    hostile = [asyncio.ensure_future(rejected(grammars, "grammar", f"{ENDLESS}\n// {i}")) for i in range(3)]
    await asyncio.sleep(0)
    for i in range(5):
        assert await grammars.check(m.Grammar("regex", f"a{{{i}}}b"))
    assert not any(task.done() for task in hostile)
    await asyncio.gather(*hostile)


async def test_a_key_s_endless_grammars_leave_places_for_other_keys(grammars: GrammarChecker) -> None:
    """Thirty checks of a second each, eight at a time: another key's valid grammar waits for none of them."""
    await grammars.check(m.Grammar("json_object"))
    sources = [f"{ENDLESS} // {i}" if i else ENDLESS for i in range(30)]
    hostile = [asyncio.create_task(grammars.check(m.Grammar("grammar", source), "hostile")) for source in sources]
    async with asyncio.timeout(10):
        while grammars._dispatcher._gate.num_waiting < 30 - grammar_checker.MAX_CHECKS_PER_SCOPE:
            await asyncio.sleep(0.005)
    assert await grammars.check(m.Grammar("regex", "x+"), "other")
    assert sum(task.done() for task in hostile) <= 2 * grammar_checker.MAX_CHECKS_PER_SCOPE
    for task in hostile:
        task.cancel()
    await asyncio.gather(*hostile, return_exceptions=True)
    # Cancelled checks go on in the process, and keep their places until it has ended them.
    assert (
        len(grammars._dispatcher._answers) <= grammar_checker.MAX_CHECKS_PER_SCOPE
        and not grammars._dispatcher._gate.num_waiting
    )
    assert await grammars.check(m.Grammar("regex", "y+"), "hostile")


async def test_a_dead_checker_is_replaced(grammars: GrammarChecker) -> None:
    await grammars.check(m.Grammar("json_object"))
    assert grammars._dispatcher._worker is not None
    os.kill(grammars._dispatcher._worker.pid, signal.SIGKILL)
    grammars._dispatcher._worker._process.wait()
    assert await grammars.check(m.Grammar("regex", "b+"))


async def test_a_check_whose_checker_is_killed_is_tried_once_more(grammars: GrammarChecker) -> None:
    await grammars.check(m.Grammar("json_object"))
    assert grammars._dispatcher._worker is not None
    first = grammars._dispatcher._worker.pid
    os.kill(first, signal.SIGSTOP)  # so that it can't answer before it is killed
    checks = [asyncio.ensure_future(grammars.check(m.Grammar("regex", source))) for source in ("a+", "b+")]
    async with asyncio.timeout(10):
        while len(grammars._dispatcher._answers) < 2:
            await asyncio.sleep(0.005)
    os.kill(first, signal.SIGKILL)
    assert all(await asyncio.gather(*checks))
    assert grammars._dispatcher._worker.pid != first


async def test_a_check_in_progress_ends_with_its_second_checker(tmp_path: Path) -> None:
    """Otherwise an endless check would continue alone, and its request would wait."""
    grammars = GrammarChecker(tiny.folder(tmp_path), LimitSettings(grammar_timeout_s=60.0))  # no check ends by itself
    await grammars.check(m.Grammar("json_object"))
    hostile = asyncio.ensure_future(rejected(grammars, "grammar", ENDLESS))
    checkers: list[psutil.Process] = []
    endless: list[psutil.Process] = []
    async with asyncio.timeout(50):
        for _ in range(2):
            while (worker := grammars._dispatcher._worker) is None or psutil.Process(worker.pid) in checkers:
                await asyncio.sleep(0.005)
            checkers.append(psutil.Process(worker.pid))
            while not (children := checkers[-1].children()):
                await asyncio.sleep(0.005)
            endless += children
            checkers[-1].kill()
        assert (await hostile).status == 503
    grammars.close()
    _, alive = psutil.wait_procs(endless, timeout=10)
    assert not alive


async def test_no_checker_starts_after_the_end(grammars: GrammarChecker) -> None:
    await grammars.check(m.Grammar("json_object"))
    hostile = asyncio.ensure_future(rejected(grammars, "grammar", ENDLESS))
    async with asyncio.timeout(10):
        while not grammars._dispatcher._answers:
            await asyncio.sleep(0.005)
    grammars.close()
    assert (await hostile).status == 503
    assert grammars._dispatcher._worker is None


async def test_a_check_that_got_no_cpu_time_continues_after_its_timeout(tmp_path: Path) -> None:
    """Its time is up before it has started, which a busy machine does to many concurrent checks."""
    grammars = GrammarChecker(tiny.folder(tmp_path), LimitSettings(grammar_timeout_s=0.001))
    try:
        assert await grammars.check(m.Grammar("regex", "a+"))
    finally:
        grammars.close()


async def test_a_model_without_an_end_token_supports_no_grammars(tmp_path: Path) -> None:
    folder = tiny.folder(tmp_path)
    config = json.loads((folder / "model.json").read_text()) | {"eos_ids": []}
    (folder / "model.json").write_text(json.dumps(config))
    grammars = GrammarChecker(folder, LimitSettings())
    try:
        assert "ends a sequence" in (await rejected(grammars, "regex", "a")).message
    finally:
        grammars.close()


# The stage


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    settings = Settings(limits=LimitSettings(max_grammar_bytes=2000))
    with Rig("ingest", settings, model_dir=tiny.folder(tmp_path)) as rig:
        rig.start(tiny.facts())
        yield rig


def structured(kind: str, source: str = "", request_id: int = 1, prompt: str = "hi") -> m.Submit:
    return tiny.submit(prompt, request_id=request_id, grammar=m.Grammar(kind, source, "response_format"))


def test_the_executor_gets_the_grammar(rig: Rig) -> None:
    for request_id in (1, 2):  # checked, then cached
        rig.send(structured("json_object", request_id=request_id), "gateway.0")
        options = tiny.options_of(rig.receive("schedule", m.Admit))
        assert json.loads(options.compiled_grammar)["grammars"][0]["json_schema"]["type"] == "object"
        assert (options.grammar, options.seed) == (None, 7)


def test_an_invalid_grammar_is_rejected_without_delaying_others(rig: Rig) -> None:
    rig.send(structured("json_schema", '{"not": {}}', 1), "gateway.0")
    rig.send(tiny.submit("hi", request_id=2), "gateway.0")
    accepted = rig.receive("gateway", m.Accepted)
    rejected = rig.receive("gateway", m.Rejected)
    assert accepted.request_id == 2
    assert rejected.request_id == 1 and rejected.failure.status == 400
    assert rejected.failure.param == "response_format" and '"not"' in rejected.failure.message


def test_a_grammar_that_is_too_large_is_rejected(rig: Rig) -> None:
    rig.send(structured("regex", "é" * 1001), "gateway.0")
    failure = rig.receive("gateway", m.Rejected).failure
    assert failure.status == 400 and "2000" in failure.message


def test_a_request_can_be_aborted_during_its_check(rig: Rig) -> None:
    rig.send(structured("grammar", ENDLESS, 5), "gateway.0")
    rig.send(m.Abort(5, 0), "gateway.0")
    assert rig.receive("gateway", m.Rejected).failure.code == "aborted"
    rig.send(tiny.submit("hi", request_id=6), "gateway.0")
    assert rig.receive("gateway").request_id == 6
