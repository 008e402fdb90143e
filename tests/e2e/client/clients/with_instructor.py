"""instructor: objects of a pydantic model, in each of its modes."""

import asyncio
from typing import Any, Literal

import instructor
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field, field_validator


class SourceLine(BaseModel):
    file: str = Field(pattern=r"^[a-z]{1,8}\.py$")
    line: int = Field(ge=1, le=99)


class Ticket(BaseModel):
    """A ticket, read from a user's mail."""

    kind: Literal["bug", "feature"]
    is_urgent: bool
    lines: list[SourceLine] = Field(min_length=1, max_length=1)


class Anything(BaseModel, extra="allow"):
    """Any object at all."""


MODES = [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA]
MESSAGES: Any = [{"role": "user", "content": "It crashes in main.py, line 7, and I have to leave in an hour!"}]


def request_for(model: str) -> dict[str, Any]:
    return {"model": model, "messages": MESSAGES, "temperature": 0, "max_tokens": 200, "max_retries": 0}


def client_of(url: str, mode: instructor.Mode) -> Any:
    return instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_an_object_is_returned(url: str, model: str, mode: instructor.Mode) -> None:
    ticket, completion = client_of(url, mode).chat.completions.create_with_completion(
        response_model=Ticket, **request_for(model)
    )
    assert isinstance(ticket, Ticket)
    assert completion.usage.completion_tokens > 10
    message = completion.choices[0].message
    if mode is instructor.Mode.TOOLS:
        (call,) = message.tool_calls
        assert (call.type, call.function.name) == ("function", "Ticket")
        text = call.function.arguments
    else:
        assert not message.tool_calls
        text = message.content
    assert Ticket.model_validate_json(text).model_dump() == ticket.model_dump()


def test_json_mode_returns_an_object(url: str, model: str) -> None:
    """The server gets no schema, so the model chooses the keys: the schema is in the prompt."""
    request = request_for(model) | {"messages": [{"role": "user", "content": "Answer with an empty object: {}"}]}
    client = client_of(url, instructor.Mode.JSON)
    assert isinstance(client.chat.completions.create(response_model=Anything, **request), Anything)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_a_reply_that_fails_validation_is_requested_again(url: str, model: str, mode: instructor.Mode) -> None:
    """The retry appends the reply (a tool call or content) and the validation error to the chat."""
    seen: list[str] = []

    class Kind(BaseModel):
        kind: Literal["bug", "feature"]

        @field_validator("kind")
        @classmethod
        def fail_first(cls, kind: str) -> str:
            seen.append(kind)
            if len(seen) == 1:
                raise ValueError("look again")
            return kind

    client = client_of(url, mode)
    num_messages: list[int] = []
    client.on("completion:kwargs", lambda *_, **kwargs: num_messages.append(len(kwargs["messages"])))
    assert (
        client.chat.completions.create(response_model=Kind, **request_for(model) | {"max_retries": 2}).kind == seen[-1]
    )
    assert len(seen) == len(num_messages) == 2
    assert num_messages[1] > num_messages[0]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_partial_objects_are_streamed(url: str, model: str, mode: instructor.Mode) -> None:
    parts = list(client_of(url, mode).chat.completions.create_partial(response_model=Ticket, **request_for(model)))
    assert len(parts) > 3
    assert parts[0].kind is None or parts[0].lines is None, "the first object is partial"
    Ticket.model_validate(parts[-1].model_dump())


def test_the_asyncio_client_works(url: str, model: str) -> None:
    async def create() -> Any:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as plain:
            client = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
            return await client.chat.completions.create(response_model=Ticket, **request_for(model))

    assert isinstance(asyncio.run(create()), Ticket)
