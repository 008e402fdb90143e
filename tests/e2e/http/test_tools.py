"""Tool calls from the real server, with a model whose template has none."""

import json
from typing import Any

import jsonschema
import pytest
from openai import BadRequestError, OpenAI

from tests.e2e.server import Server

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now"}}
ASK: dict[str, Any] = {
    "model": "SmolLM2-135M-Instruct",
    "messages": [{"role": "user", "content": "How is the weather in Athens this week?"}],
    "tools": [WEATHER, NOW],
    "max_tokens": 120,
    "temperature": 1.2,
}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def check(call: Any) -> None:
    schema = SCHEMA if call.function.name == "weather" else {"type": "object", "maxProperties": 0}
    jsonschema.validate(json.loads(call.function.arguments), schema)


def test_arguments_fit_the_schema_whatever_is_sampled(client: OpenAI) -> None:
    named = client.chat.completions.create(**ASK, n=4, seed=5, tool_choice=NAMED)
    for choice in named.choices:
        assert choice.finish_reason == "stop"
        (call,) = choice.message.tool_calls or []
        assert call.type == "function" and call.function.name == "weather"
        check(call)
    required = client.chat.completions.create(**ASK, n=4, seed=6, tool_choice="required", parallel_tool_calls=False)
    for choice in required.choices:
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        (call,) = choice.message.tool_calls or []
        check(call)


def test_a_stream_of_a_call_adds_up_to_the_whole_reply(client: OpenAI) -> None:
    whole = client.chat.completions.create(**ASK, seed=7, tool_choice=NAMED).choices[0].message.tool_calls
    with client.chat.completions.stream(**ASK, seed=7, tool_choice=NAMED) as stream:
        gathered = stream.get_final_completion().choices[0].message.tool_calls
    assert whole and gathered
    assert gathered[0].function.name == "weather"
    assert gathered[0].function.arguments == whole[0].function.arguments


def test_tools_that_cannot_be_enforced_are_rejected_at_once(client: OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}
    with pytest.raises(BadRequestError, match="not") as refused:
        client.chat.completions.create(**ASK | {"tools": [tool]}, tool_choice="required")
    assert refused.value.param == "tools[0].function.parameters"


def asked(city: str) -> dict[str, str]:
    return {"role": "user", "content": f"How is the weather in {city}?"}


def answered(city: str, weather: str) -> list[dict[str, Any]]:
    """A turn with a call. A small model calls a tool of its own accord if it has seen how."""
    function = {"name": "weather", "arguments": json.dumps({"city": city, "unit": "celsius", "days": 1})}
    return [
        asked(city),
        {"role": "assistant", "content": None, "tool_calls": [{"id": city, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": city, "content": weather},
        {"role": "assistant", "content": f"In {city}: {weather}."},
    ]


def test_a_call_that_nothing_requires_is_parsed_also_in_a_stream(client: OpenAI) -> None:
    # With two answers the model hesitates between <tool_call> and <tool_response>; with four it is sure, so the text is
    # the same with every instruction set.
    messages: Any = [
        *answered("Paris", "15 degrees, rain"),
        *answered("Rome", "24 degrees, clear"),
        *answered("Oslo", "3 degrees, snow"),
        *answered("Lima", "19 degrees, fog"),
        asked("Athens"),
    ]
    body = ASK | {"messages": messages, "temperature": 0}
    whole = client.chat.completions.create(**body).choices[0]
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    (call,) = whole.message.tool_calls or []
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments).keys() == {"city", "unit", "days"}
    with client.chat.completions.stream(**body) as stream:
        gathered = stream.get_final_completion().choices[0]
    assert gathered.finish_reason == "tool_calls"
    assert gathered.message.tool_calls and gathered.message.tool_calls[0].function.arguments == call.function.arguments


def test_tools_are_part_of_the_prompt_unless_none_may_be_called(client: OpenAI) -> None:
    one = ASK | {"max_tokens": 1}
    sizes = [
        client.chat.completions.create(**one | more).usage.prompt_tokens
        for more in ({}, {"tool_choice": "none"}, {"tools": []})
    ]
    assert sizes[0] > sizes[1] + 100 and sizes[1] == sizes[2]
