"""Custom tools and `allowed_tools` of chats, as in OpenAI's API."""

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from pipeline.client import protocol as p
from pipeline.config.settings import ChatSettings
from pipeline.runtime import messages as m
from pipeline.stages.gateway.apis.ollama.parsing import parse_chat as parse_ollama_chat
from pipeline.stages.gateway.apis.openai.parsing import parse_chat
from pipeline.stages.gateway.parsing.chat.custom_tools import arguments_of
from pipeline.stages.gateway.parsing.parsed_request import RequestLimits
from tests.stages.gateway.gate import CHAT, Gate
from tests.stages.gateway.parsing.test_conversation import FIND, HERMES, NOW, USER, parsed, prompt, refused
from tests.zmq_requests import chat, generate
from tests.zmq_requests import parsed as over_zmq

INPUT = '*** Begin Patch\n+ "é"\n*** End Patch'
PATCH = {
    "type": "custom",
    "custom": {
        "name": "apply_patch",
        "description": "It edits.",
        "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /a/"}},
    },
}
CALL = {"id": "c1", "type": "custom", "custom": {"name": "apply_patch", "input": INPUT}}
CUSTOM = {"type": "custom", "custom": {"name": "apply_patch"}}
LIMITS = RequestLimits("tiny", 64, max_prompt_tokens=1000, formats=HERMES)
NAMED = {"type": "function", "function": {"name": "find"}}


def allowed(*tools: Any, mode: str = "auto") -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


def names(found: m.ChatPrompt) -> list[str]:
    return [one["function"]["name"] for one in json.loads(found.tools or "[]")]


def test_a_custom_tool_is_a_function_with_a_text() -> None:
    found = prompt(tools=[FIND, PATCH, {"type": "custom", "custom": {"name": "say"}}])
    first, patch, say = json.loads(found.tools)
    assert first == FIND
    assert patch["type"] == "function" and patch["function"]["parameters"]["required"] == ["input"]
    assert patch["function"]["description"] == "It edits.\n\nThe input matches this lark grammar:\nstart: /a/"
    assert "description" not in say["function"]
    assert found.tool_choice == "auto"


def test_a_custom_tool_may_be_required() -> None:
    made = parsed(tools=[FIND, PATCH], tool_choice=CUSTOM)
    (found,) = made.prompts
    assert isinstance(found, m.ChatPrompt) and (found.tool_choice, found.tool_name) == ("named", "apply_patch")
    assert made.options.grammar is not None and made.reply is not None and made.reply.custom == ["apply_patch"]


def test_the_type_says_which_of_the_two_a_tool_is() -> None:
    """The other field is ignored, as other unknown ones."""
    both = FIND | {"custom": {"name": "say"}}, PATCH | {"function": {"name": "do"}}
    made = parsed(tools=[*both], tool_choice=allowed(NAMED, CUSTOM))
    (found,) = made.prompts
    assert isinstance(found, m.ChatPrompt) and names(found) == ["find", "apply_patch"]
    assert made.reply is not None and made.reply.custom == ["apply_patch"]


def test_an_escaped_type_is_the_same_type() -> None:
    body = json.dumps({"model": "tiny", "messages": [USER], "tools": [PATCH]}).replace('"custom"', '"c\\u0075stom"')
    made = parse_chat(body.encode(), RequestLimits("tiny", 64, max_prompt_tokens=1000, formats=HERMES))
    assert made.reply is not None and made.reply.custom == ["apply_patch"]


@pytest.mark.parametrize("choice", ["auto", "required", "named"])
def test_over_zeromq_they_are_functions_too(choice: str) -> None:
    messages = [p.MessageParam("user", "Patch it")]
    tools = json.dumps([FIND, PATCH])
    given: Any = CUSTOM if choice == "named" else choice
    (found,) = over_zmq(generate(1, chat(messages, tools=tools, tool_choice=given)), LIMITS).prompts
    expected = prompt(tools=[FIND, PATCH], tool_choice=given)
    assert isinstance(found, m.ChatPrompt)
    assert (found.tools, found.tool_choice) == (expected.tools, expected.tool_choice)
    assert found.tool_name == expected.tool_name


def test_over_ollama_s_routes_they_are_functions_too() -> None:
    body = {"model": "tiny", "messages": [USER], "tools": [FIND, PATCH]}
    (found,) = parse_ollama_chat(json.dumps(body).encode(), LIMITS).prompts
    assert isinstance(found, m.ChatPrompt) and found.tools == prompt(tools=[FIND, PATCH]).tools


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_the_model_gets_the_tools_that_are_allowed(mode: str) -> None:
    for each, expected in (
        ([NAMED], ["find"]),
        ([NAMED, CUSTOM], ["find", "apply_patch"]),
        ([CUSTOM], ["apply_patch"]),
    ):
        found = prompt(tools=[NOW, FIND, PATCH], tool_choice=allowed(*each, mode=mode))
        assert (names(found), found.tool_choice) == (expected, mode)
    for given in ({"tools": [NOW, FIND]}, {"tools": []}, {}):
        assert prompt(**given, tool_choice=allowed()).tools == "", "as without tools"


def test_history_has_their_calls() -> None:
    said = {"role": "assistant", "tool_calls": [CALL]}
    found = prompt(messages=[USER, said, {"role": "tool", "tool_call_id": "c1", "content": "Done"}])
    assert found.messages[1].tool_calls == [m.ToolCall("c1", "apply_patch", arguments_of(INPUT))]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].custom.name"),
        ({"tools": [{"type": "custom", "custom": {"name": "find"}}, FIND]}, "tools[1].function.name"),
        ({"tools": [FIND | {"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": [PATCH], "tool_choice": {"type": "custom"}}, "tool_choice.custom"),
        ({"tools": [FIND], "tool_choice": CUSTOM}, "tool_choice"),
        ({"tools": [FIND], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tools": [FIND], "tool_choice": allowed(mode="none")}, "tool_choice.allowed_tools.mode"),
        ({"tools": [FIND], "tool_choice": allowed(NAMED, CUSTOM)}, "tool_choice.allowed_tools.tools[1]"),
        (
            {"tools": [FIND], "tool_choice": allowed({"type": "function"})},
            "tool_choice.allowed_tools.tools[0].function",
        ),
        ({"tools": [FIND], "tool_choice": allowed(mode="required")}, "tool_choice"),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": [{"type": "custom"}]}]},
            "messages[1].tool_calls[0].custom",
        ),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": [{"id": "a"}]}]},
            "messages[1].tool_calls[0].function",
        ),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields)[0] == param


def test_tools_that_only_their_provider_runs_are_left_out() -> None:
    search = {"type": "web_search", "user_location": {"type": "approximate"}}
    made = parsed(tools=[search, FIND, {"type": "code_interpreter"}, PATCH, search])
    (found,) = made.prompts
    assert isinstance(found, m.ChatPrompt) and names(found) == ["find", "apply_patch"]
    assert made.left_out == ["code_interpreter", "web_search"]
    assert prompt(tools=[search]).tools == "" and prompt(tools=[search], tool_choice="none").tools == ""
    assert parsed(tools=[FIND, PATCH]).left_out == [] == parsed().left_out


@pytest.mark.parametrize("kind", ["web_search", 'a\r\nX-Evil: "1\\', "é" * 500])
def test_a_reply_says_what_was_left_out(kind: str, tmp_path: Path) -> None:
    body = CHAT | {"tools": [{"type": kind}], "messages": [USER]}
    with Gate(tmp_path, chat=ChatSettings(tool_call_parser="hermes", reasoning_parser="none")) as gate:
        for stream in (False, True):
            reply = gate.post(body | {"stream": stream})
            gate.delta(gate.begin(), "Hi", finish=m.Finish.STOP)
            warning = reply.result().headers["Warning"]
            assert "X-Evil" not in reply.result().headers and len(warning) < 200
            shown = warning.removeprefix('299 - "tools that only their provider runs were left out: ').removesuffix('"')
            assert shown == kind if kind == "web_search" else "?" in shown and '"' not in shown


TEXT = "".join(
    f"<tool_call>{json.dumps({'name': name, 'arguments': given})}</tool_call>"
    for name, given in (("apply_patch", {"input": INPUT}), ("find", {"a": 1}))
)


def test_the_reply_has_the_input(tmp_path: Path) -> None:
    body = CHAT | {"tools": [FIND, PATCH], "messages": [USER]}
    with Gate(tmp_path, chat=ChatSettings(tool_call_parser="hermes", reasoning_parser="none")) as gate:
        whole = gate.post(body)
        gate.delta(gate.begin(), TEXT, finish=m.Finish.STOP)
        choice = ChatCompletion.model_validate(whole.result().json()).choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
        patch, find = (one.to_dict() for one in choice.message.tool_calls)
        assert (patch["type"], patch["custom"]) == ("custom", {"name": "apply_patch", "input": INPUT})
        assert "function" not in patch and find["function"] == {"name": "find", "arguments": '{"a": 1}'}
        for cut in (len(TEXT), TEXT.index("*** End")):
            streamed = gate.post(body | {"stream": True})
            submit = gate.begin()
            for index in range(0, cut, 7):
                gate.delta(submit, TEXT[index : min(index + 7, cut)])
            gate.delta(submit, "", num_ids=0, finish=m.Finish.STOP)
            lines = [line.removeprefix("data: ") for line in streamed.result().text.splitlines() if line]
            deltas = [json.loads(line)["choices"][0]["delta"] for line in lines if line != "[DONE]"]
            calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
            begun, ended, *others = calls
            assert (begun["index"], begun["type"], begun["custom"]) == (
                0,
                "custom",
                {"name": "apply_patch", "input": ""},
            )
            assert "id" in begun and "function" not in begun
            expected = INPUT if cut == len(TEXT) else INPUT[: INPUT.index("*** End")]
            assert ended == {"index": 0, "custom": {"input": expected}}
            assert [one["index"] for one in others] == ([1] * len(others) if cut == len(TEXT) else [])
