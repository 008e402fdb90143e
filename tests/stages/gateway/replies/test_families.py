"""Replies in the formats of model families by each API: chats, Anthropic's messages, and responses."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.settings import ChatSettings
from pipeline.runtime import messages as m
from pipeline.text.formats.chat_formats import ChatFormats
from tests.stages.gateway.apis.responses import bodies
from tests.stages.gateway.gate import CHAT, Gate
from tests.stages.gateway.replies import test_chat, test_messages
from tests.stages.gateway.replies.dialects import DIALECTS, kept, parsed, user

PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}, "n": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": PARAMETERS}}]
ARGUMENTS = {"text": "5", "n": 5}
HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.find <|constrain|>json<|message|>"
    '{"text": "5", "n": 5}'
)
REPLIES: dict[str, tuple[str, str, str]] = {
    "openai": ("openai_gptoss", "<|start|>assistant", HARMONY),
    "glm45": (
        "glm45",
        "<|assistant|>",
        "\n<think>Hm.</think>\nI look.\n<tool_call>find\n<arg_key>text</arg_key>\n<arg_value>5</arg_value>\n"
        "<arg_key>n</arg_key>\n<arg_value>5</arg_value>\n</tool_call>",
    ),
    "gemma4": (
        "gemma4",
        "<|turn>model\n",
        '<|channel>thought\nHm.\n<channel|>I look.<|tool_call>call:find{text:<|"|>5<|"|>,n:5}<tool_call|>',
    ),
    "qwen3_coder": (
        "qwen3",
        "assistant\n",
        "<think>\nHm.\n</think>\n\nI look.\n<tool_call>\n<function=find>\n<parameter=text>\n5\n</parameter>\n"
        "<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>",
    ),
    "muse_glimmer": (
        "muse_glimmer",
        "<|start|>assistant",
        " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>I look.<|eom|><|start|>assistant to=find"
        '<|message|><atem:function_calls>\n<atem:invoke name="find">\n<atem:parameter name="text">5</atem:parameter>\n'
        '<atem:parameter name="n">5</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
    ),
    "kimi_k2": (
        "kimi_k2",
        "<|im_middle|>",
        "<think>Hm.</think>I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.find:3"
        '<|tool_call_argument_begin|>{"text": "5", "n": 5}<|tool_call_end|><|tool_calls_section_end|>',
    ),
}
"""The reasoning parser, the end of the prompt and a reply, by tool-call parser"""


@pytest.fixture(params=REPLIES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def gate(name: str, tmp_path: Path) -> Any:
    chat = ChatSettings(tool_call_parser=name, reasoning_parser=REPLIES[name][0])  # type: ignore[arg-type]
    with Gate(tmp_path, chat=chat) as gate:
        yield gate


def pieces(text: str) -> list[str]:
    return [text[at : at + 7] for at in range(0, len(text), 7)]


def test_a_chat_has_reasoning_content_and_a_typed_call(gate: Gate, name: str) -> None:
    _, tail, text = REPLIES[name]
    future = gate.post(CHAT | {"tools": TOOLS})
    submit = gate.submit()
    gate.accept(submit, tail=tail)
    gate.finish(submit, text)
    (choice,) = future.result().json()["choices"]
    message = choice["message"]
    (call,) = message["tool_calls"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "I look.")
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("find", ARGUMENTS)
    assert (call["id"] == "functions.find:3") == (name == "kimi_k2")
    assert choice["finish_reason"] == "tool_calls"
    streamed = test_chat.joined(test_chat.stream(gate, CHAT | {"tools": TOOLS}, *pieces(text), tail=tail))
    assert streamed == {
        "content": "I look.",
        "reasoning": "Hm.",
        "calls": [["find", call["function"]["arguments"]]],
        "finish_reason": "tool_calls",
    }


@pytest.mark.parametrize("name", ["kimi_k2"], indirect=True)
def test_an_id_that_the_model_repeats_is_that_of_the_first_call(gate: Gate) -> None:
    """A result names its call by the id, so no two calls of a reply may have one."""
    mark = "<|tool_calls_section_begin|>"
    begin, _, calls = REPLIES["kimi_k2"][2].partition(mark)
    call = calls.removesuffix("<|tool_calls_section_end|>")
    future = gate.post(CHAT | {"tools": TOOLS})
    gate.finish(gate.begin(), begin + mark + 2 * call + "<|tool_calls_section_end|>")
    first, second = (call["id"] for call in future.result().json()["choices"][0]["message"]["tool_calls"])
    assert first == "functions.find:3" != second != ""


def test_messages_have_blocks_in_the_order_of_the_reply(gate: Gate, name: str) -> None:
    _, tail, text = REPLIES[name]
    tools = {"tools": [{"name": "find", "input_schema": PARAMETERS}]}
    future = gate.post(test_messages.BODY | tools, test_messages.PATH)
    submit = gate.submit()
    gate.accept(submit, tail=tail)
    gate.finish(submit, text)
    found = future.result().json()
    assert [block["type"] for block in found["content"]] == ["thinking", "text", "tool_use"]
    assert (found["content"][0]["thinking"], found["content"][1]["text"]) == ("Hm.", "I look.")
    assert found["content"][2]["input"] == ARGUMENTS
    future = gate.post(test_messages.BODY | tools | {"stream": True}, test_messages.PATH)
    submit = gate.submit()
    gate.accept(submit, tail=tail)
    for piece in pieces(text):
        gate.delta(submit, piece)
    gate.finish(submit)
    streamed = test_messages.joined(test_messages.events_in(future.result().text))
    assert [block["type"] for block in streamed["content"]] == ["thinking", "text", "tool_use"]
    assert streamed["content"][2]["input"] == ARGUMENTS


def test_a_response_has_items_in_the_order_of_the_reply(gate: Gate, name: str) -> None:
    _, tail, text = REPLIES[name]
    body = bodies.BODY | {"tools": [{"type": "function", "name": "find", "parameters": PARAMETERS}]}
    for streams in (False, True):
        future = gate.post(body | {"stream": streams}, bodies.PATH)
        submit = gate.submit()
        gate.accept(submit, tail=tail)
        for piece in pieces(text):
            gate.delta(submit, piece)
        gate.finish(submit)
        if streams:
            output = bodies.events_of(future.result().text)[-1]["response"]["output"]
        else:
            output = future.result().json()["output"]
        assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
        assert output[0]["content"][0]["text"] == "Hm."
        assert json.loads(output[2]["arguments"]) == ARGUMENTS


def test_required_calls_have_a_grammar_in_the_models_own_format(gate: Gate, name: str) -> None:
    gate.post(CHAT | {"tools": TOOLS, "tool_choice": "required"})
    grammar = gate.submit().options.grammar
    assert grammar is not None and grammar.kind == "calls"
    rules = json.loads(grammar.source)["rules"]
    assert {
        "openai": "to=functions.find",
        "glm45": "<arg_key>",
        "gemma4": "call:find",
        "qwen3_coder": "<parameter=",
        "kimi_k2": "functions.find:",
        "muse_glimmer": "to=find",
    }[name] in rules


def test_without_tools_a_reply_has_its_answer_alone(gate: Gate, name: str) -> None:
    tail = REPLIES[name][1]
    plain = {
        "openai": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        "gemma4": "<|channel>thought\nHm.\n<channel|>Yes.",
        "muse_glimmer": " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Yes.",
    }.get(name, "<think>Hm.</think>Yes.")
    for body in (CHAT, CHAT | {"tools": TOOLS, "tool_choice": "none"}):
        future = gate.post(body)
        submit = gate.submit()
        gate.accept(submit, tail=tail)
        gate.finish(submit, plain)
        message = future.result().json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")


@pytest.mark.parametrize("key", ["chat", "messages", "responses", "ollama"])
def test_a_stream_waits_for_how_its_reply_begins(key: str) -> None:
    """Output may overtake the end of the prompt, which says that the reply begins within its reasoning."""
    formats = ChatFormats.of("", ChatSettings(tool_call_parser="hermes", reasoning_parser="qwen3"))
    dialect, output = DIALECTS[key], ("Hm", ".</think>Ye", "s.")
    request = parsed(dialect, [user("Hi")], (), formats, stream=True)
    late = kept(dialect, request, output, m.Finish.STOP, formats, "<think>\n", overtakes=True)
    assert {"Hm.", "Yes."} <= set(strings_in(late))


def strings_in(value: Any) -> list[str]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [text for one in value for text in strings_in(one)]
    return [value] if isinstance(value, str) else []
