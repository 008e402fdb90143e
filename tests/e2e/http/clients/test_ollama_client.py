"""Ollama's Python client works with the real server."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import ollama
import pytest

from tests.e2e.server import Server

MODEL = "SmolLM2-135M-Instruct"
TAGGED = f"{MODEL}:latest"
ASK: list[dict[str, Any]] = [{"role": "user", "content": "What is the capital of Greece?"}]
GREEDY = {"temperature": 0, "num_predict": 16}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
}


@pytest.fixture
def client(server: Server) -> Iterator[ollama.Client]:
    with ollama.Client(host=server.url, timeout=60) as client:
        yield client


def test_the_model_is_listed_and_described(client: ollama.Client) -> None:
    (listed,), (loaded,) = client.list().models, client.ps().models
    assert listed.model == loaded.model == loaded.name == TAGGED
    assert listed.details == loaded.details and listed.digest == loaded.digest
    assert listed.details is not None and listed.details.parameter_size == "134.5M"
    assert (listed.details.family, listed.size) == ("llama", loaded.size)
    assert loaded.context_length == 8192
    for name in (MODEL, TAGGED):
        shown = client.show(name)
        assert shown.modelinfo is not None and shown.modelinfo["llama.block_count"] == 30
        assert shown.template is not None and "<|im_start|>" in shown.template
        assert shown.capabilities == ["completion", "tools"]


def test_a_chat_and_its_stream(client: ollama.Client) -> None:
    reply = client.chat(TAGGED, ASK, options=GREEDY)
    assert "Athens" in (reply.message.content or "") and reply.model == TAGGED
    assert (reply.done, reply.done_reason, reply.prompt_eval_count) == (True, "stop", 37)
    assert reply.eval_count is not None and 1 < reply.eval_count <= 16
    assert reply.total_duration is not None and reply.prompt_eval_duration is not None and reply.eval_duration
    assert reply.total_duration >= reply.prompt_eval_duration + reply.eval_duration > 0
    parts = list(client.chat(MODEL, ASK, options=GREEDY, stream=True))
    assert "".join(part.message.content or "" for part in parts) == reply.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == reply.eval_count


def test_generate_renders_the_chat_template(client: ollama.Client) -> None:
    chat = client.chat(MODEL, [{"role": "system", "content": "Be brief."}, *ASK], options=GREEDY)
    text = client.generate(MODEL, ASK[0]["content"], system="Be brief.", options=GREEDY)
    assert (text.response, text.prompt_eval_count) == (chat.message.content, chat.prompt_eval_count)
    raw = client.generate(MODEL, "One, two, three,", raw=True, options=GREEDY | {"num_predict": 3})
    assert (raw.done_reason, raw.eval_count, raw.prompt_eval_count) == ("length", 3, 6)
    assert client.generate(MODEL, keep_alive="5m").done_reason == "load"


def test_the_seed_and_stop_strings(client: ollama.Client) -> None:
    texts = {client.chat(MODEL, ASK, options={"seed": 3, "num_predict": 12}).message.content for _ in range(2)}
    assert len(texts) == 1
    cut = client.chat(MODEL, ASK, options=GREEDY | {"stop": [" Athens"]})
    assert (cut.message.content, cut.done_reason) == ("The capital of Greece is", "stop")


def test_a_format_is_enforced(client: ollama.Client) -> None:
    options = {"num_predict": 80, "seed": 1}
    jsonschema.validate(
        json.loads(client.chat(MODEL, ASK, format=SCHEMA, options=options).message.content or ""), SCHEMA
    )
    text = client.generate(MODEL, "A city, as JSON", format=SCHEMA, options=options).response
    jsonschema.validate(json.loads(text or ""), SCHEMA)


def test_a_last_message_of_the_assistant_is_continued(client: ollama.Client) -> None:
    more = [*ASK, {"role": "assistant", "content": "The capital of Greece is"}]
    reply = client.chat(MODEL, more, options=GREEDY)
    assert (reply.message.content or "").lstrip().startswith("Athens")


def test_logprobs(client: ollama.Client) -> None:
    reply = client.chat(MODEL, ASK, options=GREEDY | {"num_predict": 3}, logprobs=True, top_logprobs=2)
    assert reply.logprobs is not None and [one.token for one in reply.logprobs] == ["The", " capital", " of"]
    for one in reply.logprobs:
        assert one.top_logprobs is not None and len(one.top_logprobs) == 2
        assert one.top_logprobs[0].logprob == one.logprob <= 0


def test_embeddings(client: ollama.Client) -> None:
    reply = client.embed(MODEL, ["The sea is calm.", "Tax returns are due."], dimensions=8)
    assert [len(one) for one in reply.embeddings] == [8, 8]
    assert all(sum(x * x for x in one) == pytest.approx(1, abs=1e-3) for one in reply.embeddings)
    assert reply.prompt_eval_count and reply.total_duration
    (whole,) = client.embed(MODEL, "The sea is calm.").embeddings
    assert client.embeddings(MODEL, "The sea is calm.").embedding == pytest.approx(whole, abs=1e-3)
    with pytest.raises(ollama.ResponseError, match="maximum context length"):
        client.embed(MODEL, "long " * 9000, truncate=False)


async def test_many_streams_at_once(server: Server) -> None:
    async def ask(client: ollama.AsyncClient) -> str:
        stream = await client.chat(MODEL, ASK, options=GREEDY, stream=True)
        return "".join([part.message.content or "" async for part in stream])

    client = ollama.AsyncClient(host=server.url, timeout=60)
    try:
        texts = await asyncio.gather(*(ask(client) for _ in range(8)))
    finally:
        await client._client.aclose()
    assert len(set(texts)) == 1 and "Athens" in texts[0]


def test_errors_are_the_client_s_exceptions(client: ollama.Client, server: Server) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    cases: list[tuple[int, str, dict[str, Any]]] = [
        (404, "model 'llama3.2' not found", {"model": "llama3.2"}),
        (400, "messages: .* maximum context length", {"messages": [{"role": "user", "content": "word " * 9000}]}),
        (400, "format: the schema can't be used", {"format": {"type": "object", "not": {}}}),
        (400, '"SmolLM2-135M-Instruct" does not support thinking', {"think": True}),
        (400, r"tools\[1\]\.function\.name", {"tools": [tool, tool]}),
        (400, r"'messages\[0\]\.images\[0\]' is an image", {"messages": [ASK[0] | {"images": [b"x"]}]}),
    ]
    for status, words, fields in cases:
        for stream in (False, True):
            with pytest.raises(ollama.ResponseError, match=words) as error:
                call: dict[str, Any] = {"model": MODEL, "messages": ASK, "stream": stream}
                list(client.chat(**call | fields))
            assert error.value.status_code == status
    with pytest.raises(ollama.ResponseError, match="fill-in-the-middle"):
        client.generate(MODEL, "def f(", suffix="return 1")
    with pytest.raises(ollama.ResponseError, match=r"Not found: POST /api/pull\. This server can.t download"):
        client.pull(MODEL)
    server.until_idle()
