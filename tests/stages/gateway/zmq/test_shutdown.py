"""Drain, death of a stage and stop close every stream. The clients don't reconnect: test_reconnect.py."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pipeline.client import protocol as p
from pipeline.client.client import AsyncClient
from pipeline.client.errors import ConnectionLost, RequestError
from pipeline.runtime import messages as m
from pipeline.stages.gateway.zmq import handshake, sweeper
from pipeline.stages.gateway.zmq import server as server_module
from tests.rig import PATIENCE_S
from tests.stages.gateway.gate import Gate
from tests.stages.gateway.peers import (
    RawPeer,
    address_of,
    all_of,
    do,
)


@pytest.fixture
async def client(gate: Gate) -> AsyncIterator[AsyncClient]:
    async with await AsyncClient.connect(address_of(gate), timeout_s=PATIENCE_S, reconnect_timeout_s=0) as client:
        yield client


class TestServerShutdown:
    async def test_a_drain_lets_streams_finish_and_refuses_new_requests(self, gate: Gate, client: AsyncClient) -> None:
        stream = client.generate("Hi")
        submit = await do(gate.begin)
        gate.rig.send(m.Drain(30.0))
        await do(gate.rig.load)
        with pytest.raises(RequestError) as raised:
            await all_of(client.generate("Hi"))
        assert (raised.value.status, raised.value.code) == (503, "draining")
        with pytest.raises(RequestError, match="shutting down"):
            await AsyncClient.connect(address_of(gate))
        gate.finish(submit, "end")
        assert [output.text for output in await all_of(stream)] == ["end"]
        await do(gate.rig.receive, "supervisor", m.Drained)

    async def test_at_the_drain_deadline_every_stream_is_closed(self, gate: Gate) -> None:
        with RawPeer(gate) as peer:
            peer.generate(1)
            first = gate.begin()
            peer.generate(2, num_credits=0)
            second = gate.begin()
            gate.finish(second, "unread")
            assert [type(peer.receive()) for _ in range(2)] == [p.Accepted] * 2
            gate.rig.send(m.Drain(0.05))
            failed = [peer.receive(p.Failed) for _ in range(2)]
            assert {one.request_id for one in failed} == {1, 2}
            assert {one.failure.code for one in failed} == {"shutting_down"}
            gate.finish(first, finish=m.Finish.ABORT)
            gate.rig.receive("supervisor", m.Drained)

    async def test_a_dead_stage_closes_every_stream_with_its_name(self, gate: Gate, client: AsyncClient) -> None:
        streams = [client.generate("Hi") for _ in range(3)]
        submits = [await do(gate.submit) for _ in streams]
        gate.accept(submits[0])
        gate.delta(submits[0], "Hel")
        assert (await anext(streams[0])).text == "Hel"
        gate.rig.send(m.StageDied("execute.0", "killed by signal 9"))
        for stream in streams:
            with pytest.raises(RequestError, match=r"stage execute\.0 died: killed by signal 9") as raised:
                await all_of(stream)
            assert raised.value.status == 500
        await do(gate.rig.receive, "supervisor", m.Drained)

    def test_a_dead_stage_closes_streams_without_credit_too(self, gate: Gate) -> None:
        with RawPeer(gate) as peer:
            for request_id in (1, 2):
                peer.generate(request_id, num_credits=0)
                submit = gate.begin()
                peer.receive(p.Accepted)
                if request_id == 1:
                    gate.finish(submit, "unread")
                    gate.closed()
            gate.rig.send(m.StageDied("execute.0", "killed by signal 9"))
            failed = [peer.receive(p.Failed) for _ in range(2)]
            assert {one.request_id for one in failed} == {1, 2}
            assert {(one.failure.status, one.failure.code) for one in failed} == {(500, "stage_died")}
            assert {one.failure.message for one in failed} == {"stage execute.0 died: killed by signal 9"}
            gate.rig.receive("supervisor", m.Drained)

    async def test_stop_closes_open_streams_and_then_the_connection(self, tmp_path: Path) -> None:
        with Gate(tmp_path) as gate:
            client = await AsyncClient.connect(address_of(gate), reconnect_timeout_s=0)
            stream = client.generate("Hi")
            await do(gate.begin)
            await do(gate.rig.send, m.Stop())
            with pytest.raises(RequestError, match="shutting down"):
                await all_of(stream)
            with pytest.raises(ConnectionLost, match="closed the connection"):
                async with asyncio.timeout(PATIENCE_S):
                    while True:
                        client.generate("Hi")
                        await asyncio.sleep(0.01)
            await client.close()

    async def test_the_client_disconnects_from_a_silent_server(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(handshake, "HEARTBEAT_S", 0.05)
        monkeypatch.setattr(sweeper, "SILENCE_S", 0.3)
        monkeypatch.setattr(sweeper, "SWEEP_S", 1000.0)
        with Gate(tmp_path) as gate:
            async with await AsyncClient.connect(address_of(gate), reconnect_timeout_s=0) as client:
                stream = client.generate("Hi")
                await do(gate.begin)
                monkeypatch.setattr(server_module.ZmqServer, "_handle", lambda *_: None)
                with pytest.raises(ConnectionLost, match=r"has sent nothing for 0\.3 s"):
                    await all_of(stream)

    async def test_a_missing_server_is_reported(self) -> None:
        with pytest.raises(ConnectionLost, match=r"no server answered at .* within 0\.1 s"):
            await AsyncClient.connect("ipc://@pipeline/missing/zmq", timeout_s=0.1)
        with pytest.raises(ValueError, match="is not a ZeroMQ address"):
            await AsyncClient.connect("nonsense")

    async def test_a_client_cannot_connect_before_the_start(self, tmp_path: Path) -> None:
        with Gate(tmp_path, start=False) as gate:
            with pytest.raises(RequestError, match="starting") as raised:
                await AsyncClient.connect(address_of(gate))
            assert raised.value.status == 503
