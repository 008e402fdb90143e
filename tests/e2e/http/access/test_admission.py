"""The real server when it is full, and when requests reach their deadlines."""

import asyncio
import json
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import httpx
import pytest

from pipeline import LLM, SamplingParams
from pipeline.client.client import AsyncClient
from pipeline.client.errors import RequestError
from tests.e2e.server import Server

MODEL = "SmolLM2-135M-Instruct"
LONG: dict[str, Any] = {"model": MODEL, "prompt": "Count to a thousand:", "max_tokens": 4000, "ignore_eos": True}
SOON_S = 0.05
"""The time limit for half of the rejections: other load on the machine can delay any single one."""

pytestmark = pytest.mark.usefixtures("smollm2_dir")


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """A server that is soon full, with priority scheduling."""
    limits = ("gateway.max_open_sequences=8", "gateway.max_open_tokens=1000")
    with Server(*limits, "schedule.policy=priority", "schedule.max_num_seqs=4") as server:
        yield server


async def test_a_full_server_rejects_requests_at_once_with_retry_after(small: Server) -> None:
    async with httpx.AsyncClient(base_url=small.url, timeout=60) as client, asyncio.timeout(120):
        request = client.build_request("POST", "/v1/completions", json=LONG | {"stream": True, "n": 4})
        streams = [await client.send(request, stream=True) for _ in range(2)]
        for stream in streams:
            assert stream.status_code == 200
        readers = [stream.aiter_bytes() for stream in streams]  # an iterator that is dropped disconnects
        assert b"data: " in await anext(readers[0])
        took_s = []
        for _ in range(31):
            begin_s = time.monotonic()
            answer = await client.post("/v1/completions", json=LONG)
            took_s.append(time.monotonic() - begin_s)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
            assert 1 <= int(answer.headers["Retry-After"]) <= 60
        assert median(took_s) < SOON_S, took_s
        answers = await asyncio.gather(*(client.post("/v1/completions", json=LONG) for _ in range(10)))
        assert [answer.status_code for answer in answers] == [503] * 10
        async with await AsyncClient.connect(small.zmq) as over_zmq:
            with pytest.raises(RequestError) as raised:
                await anext(aiter(over_zmq.generate("Hi")))
            assert (raised.value.status, raised.value.code) == (503, "overloaded")
            assert raised.value.retry_after_s is not None
        load = (await client.get("/load")).json()
        assert (load["open_sequences"], load["max_open_sequences"]) == (8, 8)
        for stream in streams:
            await stream.aclose()
    small.until_idle()
    reply = await asyncio.to_thread(
        httpx.post, f"{small.url}/v1/completions", json=LONG | {"max_tokens": 2}, timeout=60
    )
    assert reply.status_code == 200


async def test_prompt_tokens_are_limited(small: Server) -> None:
    ids = list(range(1000, 1600))
    async with httpx.AsyncClient(base_url=small.url, timeout=60) as client, asyncio.timeout(120):
        request = client.build_request("POST", "/v1/completions", json=LONG | {"stream": True, "prompt": ids})
        stream = await client.send(request, stream=True)
        rejected = await client.post("/v1/completions", json=LONG | {"prompt": ids})
        assert rejected.status_code == 503
        assert (
            "400 of 1000 prompt tokens are free, and this request has about 600" in rejected.json()["error"]["message"]
        )
        load = (await client.get("/load")).json()
        assert (load["open_tokens"], load["max_open_tokens"]) == (600, 1000)
        lines = (await client.get("/metrics")).text.splitlines()
        shown = {"pipeline_open_tokens 600", "pipeline_max_open_tokens 1000"}
        assert shown <= {line.removesuffix(".0") for line in lines}
        await stream.aclose()
        small.until_idle()
        alone = await client.post("/v1/completions", json=LONG | {"prompt": ids * 2, "max_tokens": 1})
        assert alone.status_code == 200
    assert small.until_idle()["kv_blocks"]["held"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_at_its_deadline_a_request_returns_its_partial_output(server: Server, stream: bool) -> None:
    body = LONG | {"n": 2, "timeout_s": 1.0, "stream": stream}
    begin_s = time.monotonic()
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        data = response.read().decode()
    assert time.monotonic() - begin_s < 30
    assert response.status_code == 200
    lines = [line.removeprefix("data: ") for line in data.split("\n\n") if line not in ("", "data: [DONE]")]
    events = [json.loads(line) for line in lines]
    choices = [choice for event in events for choice in event["choices"]]
    assert [one["finish_reason"] for one in choices if one["finish_reason"]] == ["abort", "abort"]
    assert all(any(one["text"] for one in choices if one["index"] == index) for index in range(2))
    health = server.until_idle()
    assert health["kv_blocks"]["free"] + health["kv_blocks"]["cached"] == health["kv_blocks"]["total"]


async def test_deadlines_in_every_stage_leave_nothing_behind(server: Server) -> None:
    """In ingest, in the queue, in a prefill, in a decode; whole and streamed, batches and echoes."""

    async def send(client: httpx.AsyncClient, number: int) -> int:
        body = LONG | {"timeout_s": (0.0005, 0.003, 0.02, 0.1, 0.4)[number % 5], "n": 1 + number % 2}
        body |= {"stream": number % 3 == 0, "echo": number % 7 == 0}
        body["prompt"] = ["a long story of the sea. " * (1 + 150 * (number % 4)), "Hi"][: 1 + number % 2]
        response = await client.post("/v1/completions", json=body)
        if response.status_code == 504:
            assert response.json()["error"]["code"] == "timeout"
        else:
            assert ('"abort"' in response.text) != ('"code":"timeout"' in response.text)
        return response.status_code

    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client, asyncio.timeout(120):
        statuses = await asyncio.gather(*(send(client, number) for number in range(60)))
        assert set(statuses) <= {200, 504} and statuses.count(504) >= 12
    health = server.until_idle()
    assert health["status"] == "ok"
    assert health["kv_blocks"]["free"] + health["kv_blocks"]["cached"] == health["kv_blocks"]["total"]
    reply = await asyncio.to_thread(
        httpx.post, f"{server.url}/v1/completions", json=LONG | {"max_tokens": 2}, timeout=60
    )
    assert reply.json()["choices"][0]["finish_reason"] == "length"


def test_cached_tokens_are_reported_and_the_prefix_cache_can_be_reset(server: Server) -> None:
    def cached(salt: str | None) -> int:
        body = LONG | {"prompt": list(range(2000, 2100)), "max_tokens": 1, "cache_salt": salt}
        usage = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["usage"]
        assert usage["prompt_tokens"] == 100
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    reset = httpx.post(f"{server.url}/reset_prefix_cache", timeout=60)
    assert reset.status_code == 200
    assert [cached(salt) for salt in (None, None, "a", "a", None)] == [0, 96, 0, 96, 96]
    assert httpx.post(f"{server.url}/reset_prefix_cache", timeout=60).json()["num_blocks"] >= 12
    assert [cached(salt) for salt in (None, "a")] == [0, 0]
    with LLM.attach(server.zmq) as llm:
        (output,) = llm.generate([list(range(2000, 2100))], SamplingParams(max_tokens=1), progress=False)
        assert output.num_cached_tokens == 96


def test_a_batch_past_its_deadline_returns_its_partial_outputs(small: Server) -> None:
    params = SamplingParams(max_tokens=4000, ignore_eos=True)
    with LLM.attach(small.zmq) as llm:
        for timeout_s in (1.0, 4.0, 16.0):  # a busy machine may generate nothing in the first
            prompts, priority = ["One", "Two", "Three"], [3, -1, 2]
            outputs = llm.generate(prompts, params, timeout_s=timeout_s, priority=priority, progress=False)
            assert [output.outputs[0].finish_reason for output in outputs] == ["abort"] * 3
            if has_tokens := any(output.outputs[0].token_ids for output in outputs):
                break
        assert has_tokens
    small.until_idle()
