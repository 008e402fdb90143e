"""The official client with the real server and model."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.e2e.server import Server

MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def question(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_the_model_is_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_the_model_answers_a_question(client: OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=question("What is the capital of Greece?"), temperature=0, max_tokens=40
    )
    choice = reply.choices[0]
    assert choice.message.content is not None
    assert "Athens" in choice.message.content
    assert choice.finish_reason == "stop", "the model ends its answer"
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert 0 < reply.usage.completion_tokens < 40


def test_the_client_reads_the_number_of_cached_tokens(client: OpenAI) -> None:
    request: dict[str, Any] = {"model": MODEL, "messages": question("Tell me of the sea. " * 20), "max_tokens": 1}
    client.chat.completions.create(**request)
    again = client.chat.completions.create(**request)
    assert again.usage is not None and again.usage.prompt_tokens_details is not None
    num_full = (again.usage.prompt_tokens - 1) // 16 * 16
    assert again.usage.prompt_tokens_details.cached_tokens == num_full > 64
    *_, last = client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
    assert last.usage is not None and last.usage.prompt_tokens_details is not None
    assert last.usage.prompt_tokens_details.cached_tokens == num_full


def test_a_stream_adds_up_to_the_whole_reply(client: OpenAI) -> None:
    request: dict[str, Any] = {
        "model": MODEL,
        "messages": question("Write a haiku about rain, then explain it – with an emoji ☔."),
        "temperature": 0.8,
        "seed": 12345,
        "max_tokens": 60,
    }
    client.chat.completions.create(**request)  # fills the prefix cache, so that both requests compute the same shapes
    whole = client.chat.completions.create(**request)
    text, finish, usage = "", None, None
    for chunk in client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}):
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
            finish = chunk.choices[0].finish_reason or finish
        usage = chunk.usage or usage
    assert text == whole.choices[0].message.content
    assert finish == whole.choices[0].finish_reason
    assert usage is not None and whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_a_completion_continues_a_prompt(client: OpenAI) -> None:
    reply = client.completions.create(model=MODEL, prompt="One, two, three, four,", temperature=0, max_tokens=6)
    assert reply.choices[0].text.startswith(" five")
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 6


def test_a_list_of_prompts_returns_a_choice_for_each(client: OpenAI) -> None:
    prompts = ["The sun is a", "Water boils at", "My dog likes to"]
    reply = client.completions.create(model=MODEL, prompt=prompts, temperature=0, max_tokens=4, n=2)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3, 4, 5]
    for even in (0, 2, 4):
        assert reply.choices[even].text == reply.choices[even + 1].text, "greedy samples of one prompt are the same"


def test_n_samples_differ_and_a_seed_repeats_them(client: OpenAI) -> None:
    request: dict[str, Any] = {
        "model": MODEL,
        "messages": question("Tell me something surprising."),
        "temperature": 1.0,
        "seed": 7,
        "n": 4,
        "max_tokens": 8,
    }
    client.chat.completions.create(**request)
    replies = [client.chat.completions.create(**request) for _ in range(2)]
    texts = [[choice.message.content for choice in reply.choices] for reply in replies]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1


def test_a_stop_string_ends_the_text_before_it(client: OpenAI) -> None:
    reply = client.completions.create(
        model=MODEL, prompt="One, two, three, four,", temperature=0, max_tokens=40, stop=[" seven", "never"]
    )
    choice = reply.choices[0]
    assert choice.text == " five, six,"
    assert choice.finish_reason == "stop"
    assert choice.model_dump()["stop_reason"] == " seven"


def test_a_stop_id_ends_the_text_and_ignore_eos_continues(client: OpenAI) -> None:
    request: dict[str, Any] = {"model": MODEL, "messages": question("Say hi."), "temperature": 0}
    short = client.chat.completions.create(**request, max_tokens=64)
    assert short.choices[0].finish_reason == "stop"
    long = client.chat.completions.create(**request, max_tokens=64, extra_body={"ignore_eos": True})
    assert long.choices[0].finish_reason == "length"
    assert long.usage is not None
    assert long.usage.completion_tokens == 64
    comma = 28  # "," in this model's vocabulary
    cut = client.completions.create(
        model=MODEL, prompt="One, two, three", temperature=0, max_tokens=20, extra_body={"stop_token_ids": [comma]}
    )
    assert (cut.choices[0].finish_reason, cut.choices[0].text) == ("stop", "")
    assert cut.choices[0].model_dump()["stop_reason"] == comma


async def test_sixteen_concurrent_requests_each_get_their_own_answer(server: Server) -> None:
    # Their first word is unambiguous: for France, this small model scores "The" and "L" within 0.1, in float32 too.
    capitals = {"Egypt": "Cairo", "Russia": "Moscow", "Greece": "Athens", "Japan": "Tokyo"}

    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:

        async def request(country: str, stream: bool) -> str:
            messages = question(f"What is the capital of {country}?")
            if not stream:
                reply = await client.chat.completions.create(
                    model=MODEL, messages=messages, temperature=0, max_tokens=24
                )
                return reply.choices[0].message.content or ""
            text = ""
            chunks = await client.chat.completions.create(
                model=MODEL, messages=messages, temperature=0, max_tokens=24, stream=True
            )
            async for chunk in chunks:
                text += chunk.choices[0].delta.content or ""
            return text

        countries = list(capitals) * 4
        answers = await asyncio.gather(*(request(country, index % 2 == 0) for index, country in enumerate(countries)))
    for country, answer in zip(countries, answers, strict=True):
        assert capitals[country] in answer
    server.until_idle()


async def test_streams_are_server_sent_events_as_openai_sends_them(server: Server) -> None:
    body = {
        "model": MODEL,
        "prompt": "A, B, C,",
        "temperature": 0,
        "max_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{server.url}/v1/completions", json=body) as response,
    ):
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/event-stream")
        events = (await response.read()).decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 5
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_a_long_prompt_goes_through_shared_memory(server: Server, client: OpenAI) -> None:
    words = " ".join(f"item{number}" for number in range(600))
    reply = client.completions.create(model=MODEL, prompt=words, temperature=0, max_tokens=8)
    assert reply.usage is not None
    assert reply.usage.prompt_tokens > 1024, "more than an inline message holds"
    assert "item600" in reply.choices[0].text
