"""Grammars of replies that are tool calls, or either tool calls or a requested format, after free reasoning."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
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


@pytest.fixture
def gpt_oss(tmp_path: Path) -> Iterator[Rig]:
    settings = Settings(chat=ChatSettings(tool_call_parser="openai", reasoning_parser="openai_gptoss"))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}<|start|>assistant"
    with Rig("ingest", settings, model_dir=tiny.folder(tmp_path, template)) as rig:
        rig.start(tiny.facts(max_model_len=256))
        yield rig


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(tiny.folder(tmp_path_factory.mktemp("engine")))


def submit(thinks: str, grammar: m.Grammar | None, **chat: Any) -> m.Submit:
    kwargs = json.dumps({"thinks": thinks})
    prompt = m.ChatPrompt([m.ChatMessage("user", "hi")], template_kwargs=kwargs, **chat)
    submitted = tiny.submit(prompt, grammar=grammar)
    options = msgspec.structs.replace(submitted.prompt_options, with_tail=True)
    return msgspec.structs.replace(submitted, prompt_options=options)


def grammar(rig: Rig) -> str:
    return tiny.options_of(rig.receive("schedule", m.Admit)).compiled_grammar


def takes(engine: Engine, grammar: str, text: str) -> bool:
    """Whether this is a valid whole reply."""
    matcher = engine.matcher(grammar)
    assert not matcher.get_error(), matcher.get_error()
    ids = tiny.byte_tokenizer().encode(text).ids
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize(("thinks", "tail"), [("yes", "<think>"), ("no", "</think>"), ("perhaps", "")])
def test_the_gateway_learns_how_the_reply_begins(rig: Rig, thinks: str, tail: str) -> None:
    rig.send(submit(thinks, None), "gateway.0")
    assert rig.receive("gateway", m.Accepted).tail == tail
    assert grammar(rig) == ""


def test_how_the_reply_begins_is_found_only_on_request(rig: Rig) -> None:
    rig.send(tiny.submit(tiny.chat("hi")), "gateway.0")
    assert rig.receive("gateway", m.Accepted).tail is None


@pytest.mark.parametrize(
    ("options", "tail"), [({"truncate": 1}, "<think>"), ({"truncate": 1, "truncates_right": True}, "")]
)
def test_a_prompt_without_its_end_does_not_begin_the_reasoning(rig: Rig, options: dict[str, Any], tail: str) -> None:
    submitted = submit("yes", None)
    cut = msgspec.structs.replace(submitted.prompt_options, **options)
    rig.send(msgspec.structs.replace(submitted, prompt_options=cut), "gateway.0")
    assert rig.receive("gateway", m.Accepted).tail == tail


def test_the_grammar_applies_after_the_reasoning(rig: Rig, engine: Engine) -> None:
    requested = m.Grammar("regex", "a+", "guided_regex")
    rig.send(submit("yes", requested), "gateway.0")
    opened = grammar(rig)
    rig.send(submit("no", requested), "gateway.0")
    over = grammar(rig)
    rig.send(submit("perhaps", requested), "gateway.0")
    unsaid = grammar(rig)
    assert takes(engine, opened, "Hm, b.\n</think>\n\naa")
    assert not takes(engine, opened, "aa")
    assert takes(engine, over, "aa")
    assert not takes(engine, over, "<think>b</think>aa")
    assert takes(engine, unsaid, "aa")
    assert takes(engine, unsaid, "<think>\nHm, b.</think>aa")
    assert not takes(engine, unsaid, "Hm, b.</think>aa")


def test_with_tools_a_reply_matches_the_grammar_or_is_tool_calls(rig: Rig, engine: Engine) -> None:
    requested = m.Grammar("json_schema", '{"enum": ["a"]}', "response_format")
    rig.send(submit("no", requested, tools=json.dumps(TOOLS)), "gateway.0")
    either = grammar(rig)
    assert takes(engine, either, '"a"')
    assert takes(engine, either, f"{CALL}\n{CALL}")
    assert not takes(engine, either, WRONG)
    assert not takes(engine, either, '"b"')
    rig.send(submit("no", requested, tools=json.dumps(TOOLS), tool_choice="none"), "gateway.0")
    assert not takes(engine, grammar(rig), CALL)


def test_the_grammar_of_strict_calls_is_the_whole_reply(rig: Rig, engine: Engine) -> None:
    strict = json.dumps({"rules": 'start: "yes" | "f(" s0 ")"\n', "schemas": {"s0": {"enum": [1]}}})
    rig.send(submit("no", m.Grammar("calls", strict, "tools"), tools=json.dumps(TOOLS)), "gateway.0")
    made = grammar(rig)
    assert takes(engine, made, "yes") and takes(engine, made, "f(1)")
    assert not takes(engine, made, CALL)


def test_tool_schemas_are_checked_like_other_grammars(rig: Rig, engine: Engine) -> None:
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


def test_an_answer_of_gpt_oss_matches_the_grammar_in_the_final_channel(gpt_oss: Rig, engine: Engine) -> None:
    requested = m.Grammar("json_schema", '{"enum": ["a"]}', "response_format")
    tools = [{"type": "function", "function": {"name": "find"}}]
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    answer = '<|channel|>final<|message|>"a"'
    call = "<|channel|>commentary to=functions.find <|constrain|>json<|message|>{}"
    gpt_oss.send(submit("", requested), "gateway.0")
    alone = grammar(gpt_oss)
    gpt_oss.send(submit("", requested, tools=json.dumps(tools)), "gateway.0")
    either = grammar(gpt_oss)
    for before in ("", thought, thought * 2):
        assert takes(engine, alone, before + answer)
        assert not takes(engine, alone, before + call)
        assert takes(engine, either, before + answer)
        assert takes(engine, either, before + call)
    assert not takes(engine, alone, '"a"')
    assert not takes(engine, either, thought + answer.replace('a"', 'b"'))
    calls = json.dumps({"rules": 'start: "x" s0\n', "schemas": {"s0": {"enum": [1]}}})
    gpt_oss.send(submit("", m.Grammar("calls", calls, "tools")), "gateway.0")
    assert takes(engine, grammar(gpt_oss), f"{thought}x1")


def budget_of(rig: Rig, submitted: m.Submit) -> m.ReasoningBudget | None:
    """What schedule gets; and the gateway, in case it submits the request again."""
    rig.send(submitted)
    accepted = rig.receive("gateway", m.Accepted)
    admit = rig.receive("schedule", m.Admit)
    options = msgspec.msgpack.decode(admit.options, type=m.GenerationOptions)
    assert accepted.reasoning_budget == options.reasoning_budget
    return options.reasoning_budget


def text_of(budget: m.ReasoningBudget | None) -> str:
    assert budget is not None
    ids = np.frombuffer(budget.closing_ids, "<i4").tolist()
    return str(tiny.byte_tokenizer().decode(ids))


def limited(submitted: m.Submit, **options: Any) -> m.Submit:
    return msgspec.structs.replace(submitted, options=msgspec.structs.replace(submitted.options, **options))


def test_a_budget_has_the_marks_of_the_model(rig: Rig) -> None:
    budget = budget_of(rig, limited(submit("yes", None), thinking_token_budget=7))
    assert budget is not None and budget.num_tokens == 7 and budget.is_open
    assert (budget.starts, budget.ends) == ([b"<think>"], [b"</think>"])
    budget = budget_of(rig, limited(submit("maybe", None), thinking_token_budget=0, reasoning_budget_message="Hm."))
    assert budget is not None and budget.num_tokens == 0 and not budget.is_open
    assert text_of(budget) == "Hm.</think>"
    assert budget_of(rig, limited(submit("no", None), thinking_token_budget=7)) is None
    assert budget_of(rig, limited(submit("yes", None), thinking_token_budget=-1)) is None
    assert budget_of(rig, submit("yes", None)) is None


def test_the_servers_budget(tmp_path: Path) -> None:
    chat = ChatSettings(reasoning_parser="qwen3", reasoning_budget=5, reasoning_budget_message="\nEnough.")
    with Rig("ingest", Settings(chat=chat), model_dir=tiny.folder(tmp_path, TEMPLATE)) as rig:
        rig.start(tiny.facts(max_model_len=256))
        budget = budget_of(rig, submit("yes", None))
        assert budget is not None and budget.num_tokens == 5 and text_of(budget) == "\nEnough.</think>"
        budget = budget_of(rig, limited(submit("yes", None), thinking_token_budget=9, reasoning_budget_message=""))
        assert budget is not None and budget.num_tokens == 9 and text_of(budget) == "</think>"
        assert budget_of(rig, limited(submit("yes", None), thinking_token_budget=-1)) is None
        assert budget_of(rig, limited(submit("yes", None), use_beam_search=True)) is None
        assert budget_of(rig, tiny.submit("<think>")) is None
