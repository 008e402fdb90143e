"""Servers that say what makes no sense."""

import asyncio
import math

import pytest
from msgspec.structs import replace

from pipeline.client import protocol as p
from pipeline.client.client import AsyncClient
from pipeline.client.errors import ConnectionLost
from tests.client.fake_gateway import WELCOME, FakeGateway


@pytest.mark.parametrize(
    ("heartbeat_s", "silence_s"),
    [(0.0, 30.0), (-1.0, 30.0), (math.nan, 30.0), (math.inf, math.inf), (5.0, math.nan), (5.0, 1e300), (5.0, 1.0)],
)
async def test_a_server_can_t_have_its_clients_spin_or_wait_for_ever(heartbeat_s: float, silence_s: float) -> None:
    gateway = FakeGateway(welcome=replace(WELCOME, heartbeat_s=heartbeat_s, silence_s=silence_s))
    await gateway.start()
    connecting = asyncio.create_task(AsyncClient.connect(gateway.address))
    await gateway.receive(p.Hello)
    try:
        with pytest.raises(
            ConnectionLost, match=f"heartbeat_s {heartbeat_s:g} and silence_s {silence_s:g}".replace("+", r"\+")
        ):
            async with asyncio.timeout(5):
                client = await connecting
                await client.close()
    finally:
        gateway.close()
