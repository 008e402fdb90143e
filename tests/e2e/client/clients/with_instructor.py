"""instructor: objects of a pydantic model, in each of the ways it has to ask for them."""

import asyncio
from typing import Any, Literal

import instructor
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field, field_validator


class Place(BaseModel):
    file: str = Field(pattern=r"^[a-z]{1,8}\.py$")
    line: int = Field(ge=1, le=99)


class Ticket(BaseModel):
    """A ticket, read from a user's mail."""

    kind: Literal["bug", "wish"]
    is_urgent: bool
    places: list[Place] = Field(min_length=1, max_length=1)


class Anything(BaseModel, extra="allow"):
    """Any object at all."""


MODES = [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA]
MESSAGES: Any = [{"role": "user", "content": "It crashes in main.py, line 7, and I have to leave in an hour!"}]


def asked(model: str) -> dict[str, Any]:
    return {"model": model, "messages": MESSAGES, "temperature": 0, "max_tokens": 200, "max_retries": 0}


def client_of(url: str, mode: instructor.Mode) -> Any:
    return instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_an_object_comes(url: str, model: str, mode: instructor.Mode) -> None:
    ticket, completion = client_of(url, mode).chat.completions.create_with_completion(
        response_model=Ticket, **asked(model)
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


def test_an_object_of_json_mode_comes(url: str, model: str) -> None:
    """Which names it has is up to the model there: the server is asked for an object, and the schema is in the
    prompt."""
    ask = asked(model) | {"messages": [{"role": "user", "content": "Answer with an empty object: {}"}]}
    client = client_of(url, instructor.Mode.JSON)
    assert isinstance(client.chat.completions.create(response_model=Anything, **ask), Anything)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_what_does_not_validate_is_asked_for_again(url: str, model: str, mode: instructor.Mode) -> None:
    """The chat then goes on with the reply, a call or content, and what was wrong with it."""
    seen: list[str] = []

    class Kind(BaseModel):
        kind: Literal["bug", "wish"]

        @field_validator("kind")
        @classmethod
        def fail_first(cls, kind: str) -> str:
            seen.append(kind)
            if len(seen) == 1:
                raise ValueError("look again")
            return kind

    client = client_of(url, mode)
    asks: list[int] = []
    client.on("completion:kwargs", lambda *_, **kwargs: asks.append(len(kwargs["messages"])))
    assert client.chat.completions.create(response_model=Kind, **asked(model) | {"max_retries": 2}).kind == seen[-1]
    assert len(seen) == len(asks) == 2
    assert asks[1] > asks[0]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_a_part_of_an_object_comes_while_it_is_written(url: str, model: str, mode: instructor.Mode) -> None:
    parts = list(client_of(url, mode).chat.completions.create_partial(response_model=Ticket, **asked(model)))
    assert len(parts) > 3
    assert parts[0].kind is None or parts[0].places is None, "the first is not whole"
    Ticket.model_validate(parts[-1].model_dump())


def test_asyncio_s_client(url: str, model: str) -> None:
    async def ask() -> Any:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as plain:
            client = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
            return await client.chat.completions.create(response_model=Ticket, **asked(model))

    assert isinstance(asyncio.run(ask()), Ticket)
