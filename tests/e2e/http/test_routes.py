"""The routes besides chats and completions, through all stages."""

import asyncio
import json
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server

MODEL = "SmolLM2-135M-Instruct"
TEXTS = ["", "Hello there", "  Ünïcödé 🧑‍🚀\n\n\t", "<|im_start|>user\nHi<|im_end|>", "word " * 9000]


def post(server: Server, path: str, body: dict[str, Any]) -> Any:
    response = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("text", TEXTS, ids=["nothing", "words", "unicode", "special", "too long to compute"])
def test_tokenize_and_detokenize_are_inverse(server: Server, text: str) -> None:
    tokens = post(server, "/tokenize", {"prompt": text, "return_token_strs": True})
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert post(server, "/detokenize", {"tokens": tokens["tokens"]}) == {"prompt": text}
    server.until_idle()


def test_tokenizing_a_chat_returns_the_ids_of_its_prompt(server: Server) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "What is the capital of Greece?"}]}
    tokens = post(server, "/tokenize", chat)
    reply = post(server, "/v1/chat/completions", chat | {"max_tokens": 1})
    assert reply["usage"]["prompt_tokens"] == tokens["count"]
    assert post(server, "/detokenize", {"tokens": tokens["tokens"]})["prompt"].endswith("<|im_start|>assistant\n")


def test_an_error_names_the_index_of_an_unknown_id(server: Server) -> None:
    for path, body, param in (
        ("/detokenize", {"tokens": [1, 2, 3, 49152]}, "tokens[3]"),
        ("/v1/completions", {"model": MODEL, "prompt": [1, 49152]}, "prompt[1]"),
        ("/v1/completions", {"model": MODEL, "prompt": [[1], [2, 49152]]}, "prompt[1][1]"),
    ):
        response = httpx.post(f"{server.url}{path}", json=body, timeout=60)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    server.until_idle()


def test_an_echo_and_its_output_are_one_text(server: Server) -> None:
    """Even if the prompt's ids end inside a character, which the first output ids complete."""
    whole = "I love 🍕🍕🍕🍕🍕🍕🍕🍕"
    ids = post(server, "/tokenize", {"prompt": whole})["tokens"]
    body = {"model": MODEL, "temperature": 0, "max_tokens": 8, "echo": True}
    cut = next(i for i in range(len(ids) - 8, 0, -1) if "\ufffd" in detokenized(server, ids[:i]))
    text = post(server, "/v1/completions", body | {"prompt": ids[:cut]})["choices"][0]["text"]
    assert "\ufffd" not in text[:-1]
    alone = post(server, "/v1/completions", body | {"prompt": ids[:cut], "echo": False})["choices"][0]["text"]
    assert text.endswith(alone)
    assert text.startswith("I love 🍕")
    written = post(server, "/v1/completions", body | {"prompt": [whole, "Hi"], "n": 2})
    assert [choice["text"][: len(whole)] for choice in written["choices"][:2]] == [whole] * 2
    assert [choice["text"][:2] for choice in written["choices"][2:]] == ["Hi"] * 2


def detokenized(server: Server, ids: list[int]) -> str:
    text: str = post(server, "/detokenize", {"tokens": ids})["prompt"]
    return text


def test_an_echo_of_no_output_needs_no_step(server: Server) -> None:
    before = server.until_idle()["counters"]
    reply = post(server, "/v1/completions", {"model": MODEL, "prompt": "Hi there", "echo": True, "max_tokens": 0})
    assert reply["choices"][0]["text"] == "Hi there"
    numbers = {"prompt_tokens": 2, "completion_tokens": 0, "total_tokens": 2}
    assert reply["usage"] == numbers | {"prompt_tokens_details": {"cached_tokens": 0}}
    assert server.until_idle()["counters"] == before


def test_lookups_are_not_counted_as_requests(server: Server) -> None:
    def counted() -> dict[str, str]:
        lines = httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines()
        names = ("vllm:request_success_total", "vllm:prompt_tokens_total", "vllm:e2e_request_latency_seconds_count")
        return dict(line.rsplit(" ", 1) for line in lines if line.startswith(names))

    before = counted()
    assert len(before) >= 3
    post(server, "/tokenize", {"prompt": "x"})
    post(server, "/detokenize", {"tokens": [1]})
    server.until_idle()
    assert counted() == before


async def test_aborted_streams_end_with_a_reason_and_leave_nothing_behind(server: Server) -> None:
    body = {"model": MODEL, "prompt": "Count to a thousand:", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    started = [asyncio.Event() for _ in range(6)]

    async def stream(client: httpx.AsyncClient, i: int) -> list[Any]:
        headers = {"X-Request-Id": f"mine-{i}"}
        async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            assert response.headers["X-Request-Id"] == f"mine-{i}"
            lines = []
            async for line in response.aiter_lines():
                started[i].set()
                lines.append(line)
        assert [line for line in lines if line][-1] == "data: [DONE]"
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]

    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client, asyncio.timeout(60):
        streams = [asyncio.create_task(stream(client, i)) for i in range(6)]
        await asyncio.gather(*(one.wait() for one in started))
        assert (await client.get("/load")).json()["server_load"] == 6
        names = ["mine-0", "mine-1", "mine-2", "cmpl-mine-3", "cmpl-mine-4", "cmpl-mine-5", "unknown"]
        answer = await client.post("/abort_requests", json={"request_ids": names})
        assert answer.json() == {"num_aborted": 6, "num_unknown": 1}
        for i, events in enumerate(await asyncio.gather(*streams)):
            assert {event["id"] for event in events} == {f"cmpl-mine-{i}"}
            assert events[-1]["choices"][0]["finish_reason"] == "abort"
    server.until_idle()


def test_an_abort_finds_its_stream_at_any_gateway() -> None:
    """Each of these clients has a connection of its own, so the kernel distributes them."""
    names = [f"mine-{i}" for i in range(8)]
    body = {"model": MODEL, "prompt": "Count to a thousand:", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with Server("gateway.replicas=2") as server, ExitStack() as stack:
        lines = []
        for name in names:
            headers = {"X-Request-Id": name}
            url = f"{server.url}/v1/completions"
            stream = stack.enter_context(httpx.stream("POST", url, json=body, headers=headers, timeout=60))
            lines.append(stream.iter_lines())
            assert next(lines[-1]).startswith("data: ")
        abort_body = {"request_ids": [*names, "unknown"]}
        assert post(server, "/abort_requests", abort_body) == {"num_aborted": len(names), "num_unknown": 1}
        for stream_lines in lines:
            *_, last, done = [line for line in stream_lines if line]
            assert (json.loads(last[6:])["choices"][0]["finish_reason"], done) == ("abort", "data: [DONE]")
        server.until_idle()
