"""The ZeroMQ door, as its clients see it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pipeline import messages as m
from pipeline.client import AsyncClient, Output, Stream
from pipeline.sampling_params import SamplingParams
from tests.rig import PATIENCE_S
from tests.stages.gateway.gate import MODEL, Gate


def address_of(gate: Gate) -> str:
    return f"ipc://@pipeline/{gate.address[1]}/door"


@pytest.fixture
async def client(gate: Gate) -> AsyncIterator[AsyncClient]:
    async with await AsyncClient.connect(address_of(gate), timeout_s=PATIENCE_S) as client:
        yield client


async def do(function: Any, *args: Any) -> Any:
    """Play the stages without stopping the client's loop."""
    return await asyncio.wait_for(asyncio.to_thread(function, *args), PATIENCE_S)


async def all_of(stream: Stream) -> list[Output]:
    async with asyncio.timeout(PATIENCE_S):
        return [output async for output in stream]


async def test_a_stream_has_the_prompts_ids_the_seed_text_ids_and_one_end(gate: Gate, client: AsyncClient) -> None:
    stream = client.generate("Hi", SamplingParams(seed=7, max_tokens=5))
    submit = await do(gate.submit)
    assert submit.prompt == m.TextPrompt("Hi")
    assert (submit.max_tokens, submit.sampling.seed) == (5, 7)
    gate.accept(submit)
    gate.delta(submit, "Hel", 2)
    async with asyncio.timeout(PATIENCE_S):
        first = await anext(stream)
    assert first == Output(0, "Hel", [0, 1])
    assert (stream.prompt_token_ids, stream.seed) == ([0, 1, 2], 7)
    gate.finish(submit, "lo")
    assert await all_of(stream) == [Output(0, "lo", [2], "stop", None, 3, 2)]
    assert (stream.num_prompt_tokens, stream.num_output_tokens) == (3, 3)
    assert await do(gate.closed) == (submit.request_id, 1)


async def test_says_what_it_serves(gate: Gate, client: AsyncClient) -> None:
    info = client.info
    assert (info.model, info.max_model_len, info.vocab_size, info.protocol_version) == (MODEL, 512, 1000, 1)
