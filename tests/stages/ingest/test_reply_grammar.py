"""Replies that are calls, or either calls or what a client wants to be matched, behind reasoning that is free."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.config.settings import ChatSettings, Settings
from pipeline.grammars.engine import Engine
from pipeline.runtime import messages as m
from tests.rig import Rig
from tests.stages.ingest import models as tiny

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{{ message.content }}\n{% endfor %}assistant:"
    "{% if thinks == 'yes' %}<think>\n{% elif thinks == 'no' %}<think>\n\n</think>\n\n{% endif %}"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "parameters": {"type": "object", "properties": {"n": {"enum": [1]}}, "required": ["n"]},
        },
    }
]
CALL = '<tool_call>\n{"name": "find", "arguments": {"n": 1}}\n</tool_call>'
WRONG = CALL.replace("1}", "2}")
CALLS = json.dumps({"rules": 'start: "f(" s0 ")"\n', "schemas": {"s0": {"enum": [1]}}})


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    settings = Settings(chat=ChatSettings(tool_call_parser="hermes", reasoning_parser="qwen3"))
    with Rig("ingest", settings, model_dir=tiny.folder(tmp_path, TEMPLATE)) as rig:
        rig.start(tiny.facts(max_model_len=256))
        yield rig


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(tiny.folder(tmp_path_factory.mktemp("engine")))


def submit(thinks: str, grammar: m.Grammar | None, **chat: Any) -> m.Submit:
    kwargs = json.dumps({"thinks": thinks})
    prompt = m.ChatPrompt([m.ChatMessage("user", "hi")], template_kwargs=kwargs, **chat)
    asked = tiny.submit(prompt, grammar=grammar)
    options = msgspec.structs.replace(asked.prompt_options, with_tail=True)
    return msgspec.structs.replace(asked, prompt_options=options)


def grammar(rig: Rig) -> str:
    return tiny.options_of(rig.receive("schedule", m.Admit)).compiled_grammar


def takes(engine: Engine, grammar: str, text: str) -> bool:
    """Whether a whole reply may be this."""
    matcher = engine.matcher(grammar)
    assert not matcher.get_error(), matcher.get_error()
    ids = tiny.byte_tokenizer().encode(text).ids
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("thinks", "end"),
    [("yes", "assistant:<think>\n"), ("no", "assistant:<think>\n\n</think>\n\n"), ("perhaps", "user:hi\nassistant:")],
)
def test_the_gateway_gets_the_end_of_the_prompt(rig: Rig, thinks: str, end: str) -> None:
    rig.send(submit(thinks, None), "gateway.0")
    tail = rig.receive("gateway", m.Accepted).tail
    assert tail is not None and tail.endswith(end)
    assert grammar(rig) == ""


def test_the_end_of_the_prompt_is_sent_only_on_request(rig: Rig) -> None:
    rig.send(tiny.submit(tiny.chat("hi")), "gateway.0")
    assert rig.receive("gateway", m.Accepted).tail is None


def test_what_is_to_be_matched_stands_behind_the_reasoning(rig: Rig, engine: Engine) -> None:
    wanted = m.Grammar("regex", "a+", "guided_regex")
    rig.send(submit("yes", wanted), "gateway.0")
    opened = grammar(rig)
    rig.send(submit("no", wanted), "gateway.0")
    over = grammar(rig)
    rig.send(submit("perhaps", wanted), "gateway.0")
    unsaid = grammar(rig)
    assert takes(engine, opened, "Hm, b.\n</think>\n\naa")
    assert not takes(engine, opened, "aa")
    assert takes(engine, over, "aa")
    assert not takes(engine, over, "<think>b</think>aa")
    assert takes(engine, unsaid, "aa")
    assert takes(engine, unsaid, "<think>\nHm, b.</think>aa")
    assert not takes(engine, unsaid, "Hm, b.</think>aa")


def test_with_tools_it_is_that_or_calls(rig: Rig, engine: Engine) -> None:
    wanted = m.Grammar("json_schema", '{"enum": ["a"]}', "response_format")
    rig.send(submit("no", wanted, tools=json.dumps(TOOLS)), "gateway.0")
    either = grammar(rig)
    assert takes(engine, either, '"a"')
    assert takes(engine, either, f"{CALL}\n{CALL}")
    assert not takes(engine, either, WRONG)
    assert not takes(engine, either, '"b"')
    rig.send(submit("no", wanted, tools=json.dumps(TOOLS), tool_choice="none"), "gateway.0")
    assert not takes(engine, grammar(rig), CALL)


def test_schemas_of_tools_are_checked_as_any(rig: Rig, engine: Engine) -> None:
    rig.send(submit("no", m.Grammar("calls", CALLS, "tools")), "gateway.0")
    assert takes(engine, grammar(rig), "f(1)")
    bad = json.dumps({"rules": "start: s0\n", "schemas": {"s0": {"not": {}}}})
    rig.send(submit("no", m.Grammar("calls", bad, "tools")), "gateway.0")
    failure = rig.receive("gateway", m.Rejected).failure
    assert (failure.status, failure.param) == (400, "tools[0].function.parameters")
    assert '"not"' in failure.message
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}]
    rig.send(submit("no", m.Grammar("json_object"), tools=json.dumps(tools)), "gateway.0")
    assert rig.receive("gateway", m.Rejected).failure.param == "tools[0].function.parameters"
