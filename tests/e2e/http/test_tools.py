"""Required tool calls from the real server, with a model whose template has no tool calls."""

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
    with pytest.raises(BadRequestError, match=r"chat\.tool_call_parser"):
        client.chat.completions.create(**ASK)
