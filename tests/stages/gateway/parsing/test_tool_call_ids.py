"""Chats whose tool calls or results have no id, as aichat sends them: their order tells them, if it is certain."""

from typing import Any

import msgspec
import pytest

from pipeline.runtime import messages as m
from pipeline.stages.gateway.errors import ApiError
from tests.stages.gateway.parsing.test_conversation import prompt

NONE: tuple[Any, ...] = (None, "", msgspec.UNSET)


def ids(messages: list[m.ChatMessage]) -> list[Any]:
    """Of the calls, as a list for each message, and of the results."""
    found: list[Any] = []
    for message in messages:
        if message.tool_calls:
            found.append([call.id for call in message.tool_calls])
        elif message.role == "tool":
            found.append(message.tool_call_id)
    return found


def chat(*given: Any) -> list[dict[str, Any]]:
    """Messages: a list is the ids of an assistant's calls, "user" is a user's, others are the ids of results."""
    messages: list[dict[str, Any]] = []
    for one in given:
        if isinstance(one, list):
            calls = [
                with_id("id", call, {"type": "function", "function": {"name": "f", "arguments": "{}"}}) for call in one
            ]
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        elif one == "user":
            messages.append({"role": "user", "content": "a"})
        else:
            messages.append(with_id("tool_call_id", one, {"role": "tool", "content": "a"}))
    return messages


def with_id(key: str, value: Any, rest: dict[str, Any]) -> dict[str, Any]:
    return rest if value is msgspec.UNSET else rest | {key: value}


@pytest.mark.parametrize("none", NONE)
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([["?", "?"], "?", "?", "user"], [["call00000", "call00001"], "call00000", "call00001"]),
        ([["?"], "?", ["?"], "?", "user"], [["call00000"], "call00000", ["call00001"], "call00001"]),
        ([["a", "b"], "?", "?"], [["a", "b"], "a", "b"]),
        ([["a", "?"], "?", "?"], [["a", "call00000"], "a", "call00000"]),
        ([["a", "b", "c"], "c", "a", "?"], [["a", "b", "c"], "c", "a", "b"]),
        ([["call00000", "?"], "?", "?"], [["call00000", "call00001"], "call00000", "call00001"]),
        ([["?", "?"], "?", "user"], [["call00000", "call00001"], "call00000"]),
        ([["?", "a"], "a", "?"], [["call00000", "a"], "a", "call00000"]),
        ([["?"]], [["call00000"]]),
        ([["a", "b"], "a", "user", ["?"], "?"], [["a", "b"], "a", ["call00000"], "call00000"]),
        ([["a", "b"], "x", "b", "user", ["?"], "?"], [["a", "b"], "x", "b", ["call00000"], "call00000"]),
    ],
)
def test_results_without_an_id_answer_the_calls_in_their_order(
    none: Any, given: list[Any], expected: list[Any]
) -> None:
    missing = [[none if one == "?" else one for one in each] if isinstance(each, list) else each for each in given]
    found = prompt(messages=chat("user", *(none if one == "?" else one for one in missing))).messages
    assert ids(found) == expected


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ([None], "messages[0].tool_call_id"),
        ([["a"], "user", None], "messages[2].tool_call_id"),
        ([["a"], None, None], "messages[2].tool_call_id"),
        ([["a", "b", "c"], "b", None], "messages[2].tool_call_id"),
        ([["a", "b"], "b", None, None], "messages[2].tool_call_id"),
        ([["a", None], "a", "b"], "messages[0].tool_calls[1].id"),
        ([[None], "b"], "messages[0].tool_calls[0].id"),
    ],
)
def test_what_is_not_certain_is_refused_by_name(given: list[Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        prompt(messages=chat(*given))
    assert (refused.value.status, refused.value.param) == (400, param)
    assert f"'{param}' is required" in refused.value.message


def test_a_chat_with_all_ids_stays_as_it_is() -> None:
    """Also one whose results answer nothing, and one that gives an id twice."""
    given = (["a", "a"], "a", "b", "user", "c")
    assert ids(prompt(messages=chat(*given)).messages) == [["a", "a"], "a", "b", "c"]
