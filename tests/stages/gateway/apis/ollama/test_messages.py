"""Messages of Ollama's API become those of a chat, with their calls and results."""

import json
from typing import Any

import pytest

from pipeline.runtime import messages as m
from tests.stages.gateway.apis.ollama.bodies import CALL, CHAT, PLAIN, TOOL, calls, parse, prompt_of, refused

# ------------------------------------------------------------------------------------------------------------ messages


def test_messages_become_those_of_a_chat() -> None:
    prompt = prompt_of(
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi", "images": []},
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [CALL | {"id": "mine"}, CALL]},
        {"role": "tool", "content": "second", "tool_call_id": "call00001"},
        {"role": "tool", "content": "first", "tool_name": "find"},
        tools=[TOOL],
    )
    system, user, assistant, second, first = prompt.messages
    assert (system.role, system.content, user.content) == ("system", "Be brief.", "Hi")
    assert (assistant.content, assistant.reasoning) == (None, "Hm.")
    assert assistant.tool_calls == [
        m.ToolCall("mine", "find", '{"x": 1.5}'),
        m.ToolCall("call00001", "find", '{"x": 1.5}'),
    ]
    assert [one.tool_call_id for one in (second, first)] == ["call00001", "mine"]
    assert (first.name, second.name) == ("find", None)
    assert (prompt.tools, prompt.tool_choice) == (json.dumps([TOOL]), "auto")


def test_results_without_ids_answer_calls_by_name_in_their_order() -> None:
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("a", "b", "a")]
    results = [{"role": "tool", "content": "x", "tool_name": name} for name in ("b", "a", "a", "c")]
    _, assistant, *found = prompt_of(*CHAT["messages"], {"role": "assistant", "tool_calls": calls}, *results).messages
    ids = [call.id for call in assistant.tool_calls]
    assert len(set(ids)) == 3 and all(len(one) == 9 and one.isalnum() for one in ids)
    assert [one.tool_call_id for one in found][:3] == [ids[1], ids[0], ids[2]]
    assert found[3].tool_call_id not in ids, "no call is left"


def test_a_call_without_an_id_gets_none_that_another_call_has() -> None:
    numbered, other, third = ({"function": {"name": name, "arguments": {}}} for name in ("find", "now", "add"))
    said = {"role": "assistant", "content": "", "tool_calls": [other, numbered | {"id": "call00002"}, third]}
    reported = [{"role": "tool", "content": name, "tool_name": name} for name in ("add", "find", "now")]
    _, found, *results = prompt_of({"role": "user", "content": "Hi"}, said, *reported).messages
    ids = {call.name: call.id for call in found.tool_calls}
    assert len(set(ids.values())) == 3 and ids["find"] == "call00002"
    assert [one.tool_call_id for one in results] == [ids["add"], ids["find"], ids["now"]]


def test_the_reply_continues_a_last_message_of_the_assistant() -> None:
    prompt = prompt_of(*CHAT["messages"], {"role": "assistant", "content": "It is"})
    assert prompt.continue_final_message and not prompt.add_generation_prompt
    assert not prompt_of({"role": "user", "content": "Hi"}).continue_final_message


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "developer", "content": "a"}, "messages[0].role"),
        ({"role": "user", "content": "a", "images": ["aGk="]}, "messages[0].images[0]"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}]}, "messages[0].content"),
        ({"role": "user", "tool_calls": [CALL]}, "messages[0].tool_calls"),
        (calls("{}"), "messages[0].tool_calls[0].function.arguments"),
        (calls([1]), "messages[0].tool_calls[0].function.arguments"),
    ],
)
def test_bad_messages_are_rejected_by_name(message: Any, param: str) -> None:
    assert refused(CHAT | {"messages": [message]}).param == param


def test_too_many_messages_are_rejected() -> None:
    error = refused(CHAT | {"messages": CHAT["messages"] * 513})
    assert (error.param, error.code) == ("messages", "context_length_exceeded")


def test_tools_need_a_known_format() -> None:
    error = refused(CHAT | {"tools": [TOOL]}, PLAIN)
    assert error.param == "tools" and '"tiny" does not support tools' in error.message
    assert parse(CHAT | {"tools": []}, PLAIN).reply is None
    assert refused(CHAT | {"tools": [{"type": "function", "function": {"name": "?"}}]}).param is not None


# -------------------------------------------------------------------------------------------------- embeddings and show


def test_each_result_answers_one_call_in_order() -> None:
    ids = ["a", "b", "c", "b"]
    names = ["f", "g", "f", "g"]
    calls = [{"id": i, "function": {"name": name}} for i, name in zip(ids, names, strict=True)]
    results = [
        {"tool_call_id": "c"},
        {"tool_name": "f"},
        {"tool_name": "f"},
        {},
        {"tool_call_id": "b"},
        {"tool_call_id": "z"},
    ]
    messages = [{"role": "tool", "content": "x", **one} for one in results]
    prompt = prompt_of({"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": calls}, *messages)
    answered = [one.tool_call_id for one in prompt.messages if one.role == "tool"]
    assert answered == ["c", "a", "call00004", "b", "b", "z"]
