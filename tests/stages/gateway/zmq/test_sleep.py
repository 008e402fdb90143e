"""Clients over ZeroMQ put the server to sleep and wake it, if the routes may do that too."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pipeline.client import protocol as p
from pipeline.client.client import AsyncClient
from pipeline.client.errors import ConnectionLost, RequestError
from pipeline.runtime import messages as m
from tests.rig import PATIENCE_S
from tests.stages.gateway.gate import Gate
from tests.stages.gateway.peers import RawPeer, address_of, do


@pytest.fixture
async def sleepy(tmp_path: Path) -> AsyncIterator[Gate]:
    with Gate(tmp_path, enable_sleep_mode=True) as gate:
        yield gate


async def answer(gate: Gate, is_sleeping: bool, problem: str = "") -> m.SetSleep:
    """The supervisor does what it was asked for, or says why not; then it is asked what has become of it."""
    asked: m.SetSleep = await do(gate.rig.receive, "supervisor", m.SetSleep)
    gate.rig.send(m.SleepSet(asked.nonce, is_sleeping, problem), "supervisor.0")
    if not problem:
        await state(gate, is_sleeping)
    return asked


async def state(gate: Gate, is_sleeping: bool) -> None:
    asked: m.AskSleep = await do(gate.rig.receive, "supervisor", m.AskSleep)
    gate.rig.send(m.SleepSet(asked.nonce, is_sleeping), "supervisor.0")


async def test_a_client_puts_the_server_to_sleep_and_wakes_it(sleepy: Gate) -> None:
    async with await AsyncClient.connect(address_of(sleepy), timeout_s=PATIENCE_S) as client:
        falling = asyncio.create_task(client.sleep(wake_on_request=True))
        asked = await answer(sleepy, True)
        assert asked.sleeps and asked.wakes_on_request
        await falling
        looking = asyncio.create_task(client.is_sleeping())
        await state(sleepy, True)
        assert await looking
        waking = asyncio.create_task(client.wake_up())
        assert not (await answer(sleepy, False)).sleeps
        await waking


async def test_the_server_s_reason_arrives(sleepy: Gate) -> None:
    async with await AsyncClient.connect(address_of(sleepy), timeout_s=PATIENCE_S) as client:
        falling = asyncio.create_task(client.sleep())
        await answer(sleepy, False, "execute.0 is being restarted: try again later")
        with pytest.raises(RequestError, match="try again later") as raised:
            await falling
        assert raised.value.status == 409


async def test_without_the_setting_it_is_forbidden(gate: Gate) -> None:
    async with await AsyncClient.connect(address_of(gate), timeout_s=PATIENCE_S) as client:
        for call in (client.sleep, client.wake_up):
            with pytest.raises(RequestError, match="enable_sleep_mode") as raised:
                await call()
            assert raised.value.status == 403
    assert gate.rig.nothing("supervisor", 0)


async def test_with_an_admin_listener_only_that_may(tmp_path: Path) -> None:
    with Gate(tmp_path, enable_sleep_mode=True, admin_port=0) as gate:
        async with await AsyncClient.connect(address_of(gate), timeout_s=PATIENCE_S) as client:
            for call in (client.sleep, client.wake_up, client.is_sleeping):
                with pytest.raises(RequestError, match="only the admin listener"):
                    await call()


async def test_a_connection_that_ends_answers_too(sleepy: Gate) -> None:
    client = await AsyncClient.connect(address_of(sleepy), timeout_s=PATIENCE_S, reconnect_timeout_s=0)
    falling = asyncio.create_task(client.sleep())
    await do(sleepy.rig.receive, "supervisor", m.SetSleep)
    await client.close()
    with pytest.raises(ConnectionLost, match="closed"):
        await falling


def test_an_answer_to_a_client_that_is_gone_is_dropped(tmp_path: Path) -> None:
    with Gate(tmp_path, enable_sleep_mode=True) as gate, RawPeer(gate) as other:
        with RawPeer(gate) as peer:
            peer.send(p.SetSleep(1, True))
            asked = gate.rig.receive("supervisor", m.SetSleep)
            peer.send(p.Bye())
            assert peer.is_disconnected()
        gate.rig.send(m.SleepSet(asked.nonce, True), "supervisor.0")
        assert other.is_still_served()
