"""The official client: tools, structured output, logprobs, embeddings and errors, in its own types."""

import base64
import json
import struct
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field

from tests.e2e.client.sdks.test_openai_client import MODEL, question
from tests.e2e.server import Server


class Visit(BaseModel):
    """A visit to a city."""

    city: Literal["Athens", "Cairo", "Oslo"]
    num_nights: int = Field(ge=1, le=9)
    by_train: bool


PLAN: Any = pydantic_function_tool(Visit, name="plan_visit")
LIST: Any = {
    "type": "function",
    "function": {"name": "list_visits", "parameters": {"type": "object", "properties": {}}},
}
NAMED: Any = {"type": "function", "function": {"name": "plan_visit"}}
ASK: dict[str, Any] = {
    "model": MODEL,
    "messages": question("Plan a visit to Oslo, by train, for three nights."),
    "temperature": 0,
    "max_tokens": 100,
}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
    server.until_idle()


# ------------------------------------------------------------------------------------------------------------ tools


def test_a_named_function_is_called_according_to_its_schema(client: OpenAI) -> None:
    reply = client.chat.completions.parse(**ASK, tools=[PLAN], tool_choice=NAMED)
    choice = reply.choices[0]
    assert choice.finish_reason == "stop", "OpenAI's value for a named function"
    assert choice.message.content is None and choice.message.tool_calls
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "plan_visit")
    assert isinstance(call.function.parsed_arguments, Visit)


def test_a_required_call_and_its_result_continue_a_chat(client: OpenAI) -> None:
    request = ASK | {"max_tokens": 300, "tools": [PLAN, LIST], "tool_choice": "required", "parallel_tool_calls": False}
    choice = client.chat.completions.create(**request).choices[0]
    assert choice.finish_reason == "tool_calls"
    calls = choice.message.tool_calls or []
    assert calls and len({call.id for call in calls}) == len(calls)
    for call in calls:
        assert call.type == "function"
        arguments = json.loads(call.function.arguments)
        if call.function.name == "plan_visit":
            Visit.model_validate(arguments)
        else:
            assert (call.function.name, arguments) == ("list_visits", {})
    answers: list[Any] = [{"role": "tool", "tool_call_id": call.id, "content": "It is done."} for call in calls]
    request = ASK | {"messages": [*ASK["messages"], choice.message, *answers]}
    after = client.chat.completions.create(**request)
    assert after.choices[0].message.content and after.choices[0].message.tool_calls is None


def test_a_call_streams_its_name_first_and_arguments_incrementally(client: OpenAI) -> None:
    request = ASK | {"tools": [PLAN, LIST], "tool_choice": "required", "parallel_tool_calls": False, "n": 3, "seed": 5}
    choices: list[list[Any]] = [[], [], []]
    for chunk in client.chat.completions.create(**request | {"temperature": 1.0}, stream=True):
        for choice in chunk.choices:
            choices[choice.index].append(choice)
    for own in choices:
        assert [choice.finish_reason for choice in own] == [None] * (len(own) - 1) + ["tool_calls"]
        assert not any(choice.delta.content for choice in own)
        first, *rest = [delta for choice in own for delta in choice.delta.tool_calls or ()]
        assert (first.index, first.type) == (0, "function") and first.id.startswith("call_")
        assert all((one.index, one.id, one.type, one.function.name) == (0, None, None, None) for one in rest)
        text = "".join(one.function.arguments for one in (first, *rest))
        if first.function.name == "plan_visit":
            assert len(rest) > 1, "arguments are streamed incrementally"
            Visit.model_validate_json(text)
        else:
            assert (first.function.name, json.loads(text)) == ("list_visits", {})


async def test_the_client_s_stream_helper_assembles_a_call(server: Server) -> None:
    async with (
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client,
        client.chat.completions.stream(**ASK, tools=[PLAN], tool_choice=NAMED) as stream,
    ):
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert kinds.count("tool_calls.function.arguments.done") == 1
    assert kinds.count("tool_calls.function.arguments.delta") > 1
    (call,) = final.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Visit)


def test_tool_choice_none_calls_no_tool(client: OpenAI) -> None:
    reply = client.chat.completions.create(**ASK, tools=[PLAN], tool_choice="none")
    assert reply.choices[0].message.content and not reply.choices[0].message.tool_calls


# ------------------------------------------------------------------------------------------------- structured output


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_content_is_an_object_of_the_class(client: OpenAI, temperature: float) -> None:
    request = ASK | {"temperature": temperature, "seed": 11, "n": 3}
    reply = client.chat.completions.parse(**request, response_format=Visit)
    assert len(reply.choices) == 3
    for choice in reply.choices:
        assert choice.finish_reason == "stop" and choice.message.refusal is None
        assert isinstance(choice.message.parsed, Visit)


def test_streamed_content_is_parsed_incrementally(client: OpenAI) -> None:
    with client.chat.completions.stream(**ASK, response_format=Visit) as stream:
        events = list(stream)
    deltas = [event for event in events if event.type == "content.delta"]
    assert len(deltas) > 3
    (done,) = [event for event in events if event.type == "content.done"]
    assert isinstance(done.parsed, Visit)
    assert "".join(event.delta for event in deltas) == done.content


def test_truncated_content_is_distinguished_from_complete_content(client: OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**ASK | {"max_tokens": 4}, response_format=Visit)


# ------------------------------------------------------------------------------------- log probabilities, embeddings


def test_logprobs_of_a_chat_and_of_a_completion_are_returned(client: OpenAI) -> None:
    reply = client.chat.completions.create(**ASK | {"max_tokens": 8}, logprobs=True, top_logprobs=3)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and len(logprobs.content) == 8
    assert b"".join(bytes(one.bytes or ()) for one in logprobs.content).decode() == reply.choices[0].message.content
    for one in logprobs.content:
        tops = [top.logprob for top in one.top_logprobs]
        assert len(tops) == 3 and tops == sorted(tops, reverse=True) and tops[0] == one.logprob <= 0

    completion = client.completions.create(
        model=MODEL, prompt="One, two,", max_tokens=5, temperature=0, logprobs=2, echo=True
    )
    text, listed = completion.choices[0].text, completion.choices[0].logprobs
    assert listed is not None and listed.tokens and listed.token_logprobs and listed.text_offset
    assert "".join(listed.tokens) == text and text.startswith("One, two,")
    assert [text[at:].startswith(token) for at, token in zip(listed.text_offset, listed.tokens, strict=True)].count(
        True
    ) == len(listed.tokens)
    assert listed.token_logprobs[0] is None and all(number <= 0 for number in listed.token_logprobs[1:])


def test_texts_and_ids_return_embeddings(client: OpenAI, server: Server) -> None:
    texts = ["The sea is calm.", "Tax returns are due."]
    reply = client.embeddings.create(model=MODEL, input=texts)  # as base64, which the client decodes
    assert [one.index for one in reply.data] == [0, 1]
    assert reply.usage.prompt_tokens == reply.usage.total_tokens > 4
    plain = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    for one, other in zip(reply.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-3)
        assert sum(number**2 for number in one.embedding) == pytest.approx(1, abs=1e-3)
    raw = client.embeddings.with_raw_response.create(model=MODEL, input=texts[0], encoding_format="base64")
    packed = base64.b64decode(json.loads(raw.text)["data"][0]["embedding"])
    assert len(struct.unpack(f"<{len(packed) // 4}f", packed)) == len(reply.data[0].embedding)
    short = client.embeddings.create(model=MODEL, input=texts[0], dimensions=16, encoding_format="float")
    assert len(short.data[0].embedding) == 16
    ids = httpx.post(f"{server.url}/tokenize", json={"prompt": texts[0]}).json()["tokens"]
    by_ids = client.embeddings.create(model=MODEL, input=[ids], encoding_format="float")
    assert by_ids.data[0].embedding == pytest.approx(plain.data[0].embedding, abs=1e-3)


# ----------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("kind", "status", "param", "change"),
    [
        (openai.BadRequestError, 400, "temperature", {"temperature": 9}),
        (openai.BadRequestError, 400, "messages", {"messages": []}),
        (openai.BadRequestError, 400, "max_tokens", {"max_tokens": 100_000}),
        (openai.BadRequestError, 400, "tools[0].type", {"tools": [LIST | {"type": "code"}]}),
        (openai.BadRequestError, 400, "tool_choice", {"tools": [LIST], "tool_choice": NAMED}),
        (openai.NotFoundError, 404, "model", {"model": "another"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_error_has_the_class_of_its_status(
    client: OpenAI, kind: type[openai.APIStatusError], status: int, param: str, change: dict[str, Any]
) -> None:
    for stream in (False, True):
        with pytest.raises(kind) as refusal:
            client.chat.completions.create(**ASK | change, stream=stream)
        error = refusal.value
        assert (error.status_code, error.param, error.type) == (status, param, "invalid_request_error")


def test_an_invalid_schema_is_rejected_at_once(client: OpenAI) -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "what"}}}
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(**ASK, response_format=schema)
    assert (refusal.value.param or "").startswith("response_format")


def test_unknown_routes_return_404(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.images.generate(model=MODEL, prompt="Hi")


def test_a_client_that_times_out_aborts_its_request(client: OpenAI, server: Server) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).chat.completions.create(
            **ASK | {"max_tokens": 4000}, extra_body={"ignore_eos": True}
        )
    server.until_idle(timeout_s=10)


def test_a_request_has_the_id_that_its_client_sends(client: OpenAI) -> None:
    reply = client.chat.completions.create(**ASK | {"max_tokens": 1}, extra_headers={"X-Request-Id": "mine-7"})
    assert (reply.id, reply._request_id) == ("chatcmpl-mine-7", "mine-7")
