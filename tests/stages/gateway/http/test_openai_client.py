"""The official OpenAI client works with the server."""

import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from pipeline.runtime import messages as m
from tests.rig import PATIENCE_S
from tests.stages.gateway.gate import MODEL, Gate

MESSAGES: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def client(gate: Gate) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gate.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


def test_a_chat_is_answered(gate: Gate, client: openai.OpenAI) -> None:
    future = gate.do(client.chat.completions.create, model=MODEL, messages=MESSAGES, n=2)
    gate.serve("Hello")
    response = future.result()
    assert [c.message.content for c in response.choices] == ["Hello", "Hello"]
    assert [c.finish_reason for c in response.choices] == ["stop", "stop"]
    assert response.usage.total_tokens == 5


def test_a_chat_is_streamed(gate: Gate, client: openai.OpenAI) -> None:
    def read() -> list[openai.types.chat.ChatCompletionChunk]:
        options: Any = {"include_usage": True}
        with client.chat.completions.create(
            model=MODEL, messages=MESSAGES, n=2, stream=True, stream_options=options
        ) as stream:
            return list(stream)

    future = gate.do(read)
    gate.serve("Hello")
    *chunks, last = future.result()
    for index in range(2):
        choices = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert choices[0].delta.role == "assistant"
        assert "".join(c.delta.content or "" for c in choices) == "Hello"
        assert choices[-1].finish_reason == "stop"
    assert last.usage is not None and last.usage.completion_tokens == 2


def test_a_stream_is_accumulated(gate: Gate, client: openai.OpenAI) -> None:
    def read() -> str | None:
        with client.chat.completions.stream(model=MODEL, messages=MESSAGES) as stream:
            return stream.get_final_completion().choices[0].message.content

    future = gate.do(read)
    gate.serve("Hello")
    assert future.result() == "Hello"


def test_several_prompts_are_completed(gate: Gate, client: openai.OpenAI) -> None:
    future = gate.do(client.completions.create, model=MODEL, prompt=["a", "b"])
    gate.serve("1")
    gate.serve("2")
    assert [(c.index, c.text) for c in future.result().choices] == [(0, "1"), (1, "2")]


def test_a_completion_is_streamed(gate: Gate, client: openai.OpenAI) -> None:
    def read() -> str:
        with client.completions.create(model=MODEL, prompt="a", stream=True) as stream:
            return "".join(chunk.choices[0].text for chunk in stream)

    future = gate.do(read)
    gate.serve("Hello")
    assert future.result() == "Hello"


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_errors_raise_the_matching_exceptions(gate: Gate, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=9)
    assert bad.value.param == "temperature"


@pytest.mark.parametrize("n", [1, 2])
def test_an_error_within_a_stream_is_raised(gate: Gate, client: openai.OpenAI, n: int) -> None:
    has_begun = threading.Event()
    choices: list[openai.types.chat.chat_completion_chunk.Choice] = []

    def read() -> None:
        with client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, n=n) as stream:
            for chunk in stream:
                has_begun.set()
                choices.extend(chunk.choices)

    future = gate.do(read)
    submit = gate.begin()
    gate.delta(submit, "x")
    assert has_begun.wait(PATIENCE_S)
    for index in range(1, n):
        gate.finish(submit, index=index)
    gate.delta(submit, "y", finish=m.Finish.ERROR)
    with pytest.raises(openai.APIError, match="could not finish"):
        future.result()
    failed = [choice for choice in choices if choice.index == 0]
    assert "".join(choice.delta.content or "" for choice in failed) == "xy"
    assert all(choice.finish_reason is None for choice in failed)


def test_closing_a_stream_aborts_its_request(gate: Gate, client: openai.OpenAI) -> None:
    def read_one() -> None:
        with client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True) as stream:
            next(iter(stream))

    future = gate.do(read_one)
    submit = gate.submit()
    gate.delta(submit, "x")
    future.result()
    assert gate.rig.receive("schedule", m.Abort).request_id == submit.request_id
