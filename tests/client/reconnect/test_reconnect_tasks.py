"""Requests for embeddings, scores and labels after a lost connection."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from pipeline.client import protocol as p
from pipeline.client.errors import RequestError
from pipeline.client.inputs.pooling_params import PoolingParams
from tests.client.fake_gateway import WELCOME, FakeGateway
from tests.client.reconnect.test_reconnect import accepted, connected, finished, until


@pytest.fixture
async def gateway() -> AsyncIterator[FakeGateway]:
    gateway = FakeGateway(welcome=replace(WELCOME, tasks=["embed", "score"]))
    await gateway.start()
    yield gateway
    gateway.close()


@pytest.mark.parametrize(
    ("prompt", "params"),
    [("Hi", PoolingParams()), ({"prompt": "a", "pair": "b"}, PoolingParams(task="score", instruction="Find it."))],
)
async def test_a_task_that_was_accepted_is_sent_again_as_it_was(
    gateway: FakeGateway, prompt: Any, params: PoolingParams
) -> None:
    """Its ids would lose the pair, and it has no output that it could go on behind."""
    client = await connected(gateway)
    streams = [client.embed(prompt, params), client.embed("late", timeout_s=0.4)]
    first = [await gateway.receive(p.Generate) for _ in streams]
    await gateway.send(*map(accepted, first))
    await until(lambda: streams[0].prompt_token_ids is not None)
    gateway.kill()
    await until(lambda: not client.is_connected)
    with pytest.raises(RequestError, match="before its embedding was computed"):
        await streams[1].embedded()
    await gateway.start()
    assert await gateway.receive(p.Generate) == first[0]
    await gateway.send(replace(finished(first[0]), embedding=b"\0\0\x80?"))
    assert (await streams[0].embedded()).tolist() == [1.0]
    await client.close()
