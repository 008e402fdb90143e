"""The `openai` client's Responses API with the real server."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from openai.types.responses import Response, ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText

from tests.e2e.server import Server

MODEL = "SmolLM2-135M-Instruct"
QUESTION = "What is the capital of Greece?"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 8}
LONG: dict[str, Any] = {"model": MODEL, "input": "Hi", "max_output_tokens": 7000, "extra_body": {"ignore_eos": True}}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "name": "weather", "description": "Of a city", "parameters": SCHEMA, "strict": True}
WAIT_S = 60.0


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S) as client:
        yield client


def until(client: OpenAI, response_id: str, condition: Callable[[Response], bool]) -> Response:
    end_s = time.monotonic() + WAIT_S
    while not condition(response := client.responses.retrieve(response_id)):
        assert time.monotonic() < end_s, f"still {response.status}"
        time.sleep(0.02)
    return response


def test_a_response_matches_the_chat_of_the_same_messages(client: OpenAI) -> None:
    response = client.responses.create(**GREEDY, input=QUESTION, instructions="Be brief.", metadata={"a": "b"})
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    chat = client.chat.completions.create(model=MODEL, temperature=0, max_tokens=8, messages=messages)
    assert response.output_text == chat.choices[0].message.content != ""
    assert chat.usage is not None and response.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == chat.usage.completion_tokens
    assert (response.instructions, response.metadata, response.max_output_tokens) == ("Be brief.", {"a": "b"}, 8)
    Response.model_validate(response.to_dict())


def test_a_stream_adds_up_to_the_response(client: OpenAI) -> None:
    whole = client.responses.create(**GREEDY, input=QUESTION)
    with client.responses.stream(**GREEDY, input=QUESTION) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")] == list(range(len(events)))
    names = [event.type.removeprefix("response.") for event in events]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(names[4:-4]) == {"output_text.delta"}
    ends = ["output_text.done", "content_part.done", "output_item.done"]
    assert names[-4:] in ([*ends, "completed"], [*ends, "incomplete"])
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == final.output_text
    assert final.status == whole.status


def test_a_json_schema_is_enforced(client: OpenAI) -> None:
    text: Any = {"format": {"type": "json_schema", "name": "trip", "schema": SCHEMA, "strict": True}}
    response = client.responses.create(
        model=MODEL, input="A trip to Athens", text=text, max_output_tokens=100, temperature=1.2
    )
    jsonschema.validate(json.loads(response.output_text), SCHEMA)
    assert response.text is not None and response.text.format is not None
    assert response.text.format.type == "json_schema"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_required_function_call_and_its_result(client: OpenAI, choice: Any) -> None:
    first = client.responses.create(
        model=MODEL, input="The weather?", tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False
    )
    (call,) = first.output
    assert isinstance(call, ResponseFunctionToolCall) and call.name == "weather"
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = client.responses.create(**GREEDY, input=[output], previous_response_id=first.id)
    assert second.previous_response_id == first.id
    items = client.responses.input_items.list(second.id, order="asc").data
    assert [item.type for item in items] == ["message", "function_call", "function_call_output"]
    with client.responses.stream(
        model=MODEL, input="The weather?", tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False
    ) as stream:
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        (streamed,) = stream.get_final_response().output
    assert streamed.type == "function_call" and streamed.arguments == "".join(pieces)


def test_logprobs(client: OpenAI) -> None:
    response = client.responses.create(
        **GREEDY, input=QUESTION, include=["message.output_text.logprobs"], top_logprobs=2
    )
    (message,) = response.output
    assert isinstance(message, ResponseOutputMessage) and isinstance(message.content[0], ResponseOutputText)
    logprobs = message.content[0].logprobs
    assert logprobs is not None and response.usage is not None and len(logprobs) == response.usage.output_tokens
    assert all(len(one.top_logprobs) == 2 and one.token == one.top_logprobs[0].token for one in logprobs)


def test_a_conversation_goes_on_and_its_items_are_paged(client: OpenAI) -> None:
    first = client.responses.create(**GREEDY, input=QUESTION)
    second = client.responses.create(**GREEDY, input="And of Italy?", previous_response_id=first.id)
    messages: Any = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And of Italy?"},
    ]
    assert second.output_text == client.responses.create(**GREEDY, input=messages, store=False).output_text
    roles = [item.role for item in client.responses.input_items.list(second.id, limit=1) if item.type == "message"]
    assert roles == ["user", "assistant", "user"]  # newest first


def test_a_background_response_is_polled(client: OpenAI) -> None:
    queued = client.responses.create(**GREEDY, input=QUESTION, background=True)
    assert queued.status == "queued"
    done = until(client, queued.id, lambda response: response.status not in ("queued", "in_progress"))
    assert done.output_text == client.responses.create(**GREEDY, input=QUESTION).output_text


def test_a_background_stream_is_resumed(client: OpenAI) -> None:
    whole = client.responses.create(**GREEDY, input=QUESTION)
    with client.responses.create(**GREEDY, input=QUESTION, background=True, stream=True) as stream:
        first = next(stream)
        assert first.type == "response.created" and first.response.status == "queued"
        second = next(stream)
        assert (second.type, second.sequence_number) == ("response.queued", 1)
    rest = list(client.responses.retrieve(first.response.id, stream=True, starting_after=second.sequence_number))
    assert rest[0].type == "response.in_progress" and rest[0].sequence_number == 2
    assert "".join(event.delta for event in rest if event.type == "response.output_text.delta") == whole.output_text
    assert rest[-1].type in ("response.completed", "response.incomplete")
    with client.responses.stream(response_id=first.response.id, starting_after=1) as resumed:
        assert resumed.get_final_response().output_text == whole.output_text


def test_a_background_response_is_cancelled(client: OpenAI, server: Server) -> None:
    queued = client.responses.create(**LONG, background=True)
    until(client, queued.id, lambda response: response.status == "in_progress")
    assert client.responses.cancel(queued.id).status == "cancelled"
    assert client.responses.retrieve(queued.id).status == "cancelled"
    server.until_idle()


def test_a_deleted_response_is_gone(client: OpenAI) -> None:
    response = client.responses.create(**GREEDY, input=QUESTION)
    assert client.responses.retrieve(response.id).output_text == response.output_text
    client.responses.delete(response.id)
    with pytest.raises(NotFoundError) as missing:
        client.responses.retrieve(response.id)
    assert missing.value.code == "response_not_found"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}, {"type": "function"}]}, "tools[1].name"),
        ({"temperature": 9}, "temperature"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"input": "a " * 20_000}, "input"),
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
        (
            {"tools": [WEATHER | {"parameters": {"not": {}}}], "tool_choice": {"type": "function", "name": "weather"}},
            "tools[0].parameters",
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "nothing"}}}},
            "text.format.schema",
        ),
    ],
    ids=lambda one: str(one)[:40],
)
def test_errors_name_the_field(client: OpenAI, fields: Any, param: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        client.responses.create(**{"model": MODEL, "input": "Hi"} | fields)
    assert refused.value.param == param


def test_closing_a_stream_aborts_it(client: OpenAI, server: Server) -> None:
    stream = client.responses.create(**LONG, stream=True)
    for event in stream:
        if event.type == "response.output_text.delta":
            break
    stream.close()
    server.until_idle()
