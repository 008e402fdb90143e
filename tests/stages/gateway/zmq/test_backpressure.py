"""Clients that read nothing: their output is merged, others do not wait, and they are disconnected in time."""

import itertools
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import zmq

from pipeline.client import protocol as p
from pipeline.runtime import messages as m
from pipeline.runtime.process import suspension
from pipeline.stages.gateway.zmq import listener, peer_sender, sweeper
from pipeline.stages.gateway.zmq import stream as zmq_stream
from pipeline.stages.gateway.zmq.peer import ClientPeer
from tests.rig import PATIENCE_S
from tests.stages.gateway.gate import Gate
from tests.stages.gateway.peers import RawPeer, is_served
from tests.zmq_requests import generate


def open_bytes(gate: Gate) -> int:
    return int(gate.client.get("/load").json()["open_bytes"])


class TestSlowClients:
    def test_without_credit_deltas_merge_and_others_do_not_wait(self, gate: Gate) -> None:
        with RawPeer(gate) as slow, RawPeer(gate) as quick:
            slow.generate(1, num_credits=1)
            first = gate.begin()
            assert isinstance(slow.receive(), p.Accepted)
            gate.delta(first, "a")
            assert slow.receive(p.Delta).outputs[0].text == "a"
            for _ in range(500):
                gate.delta(first, "bc")
            quick.generate(1)
            second = gate.begin()
            gate.finish(second, "x")
            assert [type(quick.receive()) for _ in range(3)] == [p.Accepted, p.Delta, p.Finished]
            gate.finish(first, "d")
            gate.closed()
            assert slow.receives_nothing()
            slow.send(p.Credit(1, 1))
            (output,) = slow.receive(p.Delta).outputs
            assert (output.text, output.text_offset, output.token_offset) == ("bc" * 500 + "d", 1, 1)
            assert output.token_ids == np.arange(1, 502, dtype="<i4").tobytes()
            assert output.finish_reason == "stop"
            assert slow.receive(p.Finished).num_output_tokens == 502

    def test_a_request_without_credit_for_too_long_fails(self, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(zmq_stream, "STALL_S", 0.1)
        with RawPeer(gate) as peer:
            peer.generate(1, num_credits=0)
            submit = gate.begin()
            peer.receive(p.Accepted)
            gate.delta(submit, "a")
            failure = peer.receive(p.Failed).failure
            assert (failure.status, failure.code) == (408, "stalled")
            assert gate.rig.receive("schedule", m.Abort).request_id == submit.request_id
            gate.finish(submit, finish=m.Finish.ABORT)
            gate.closed()
            assert gate.rig.load().num_open_requests == 0
            assert peer.is_still_served()

    def test_the_time_in_which_the_gateway_was_suspended_is_no_stall(
        self, gate: Gate, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        due_s: list[float] = []

        def missed(one_s: float) -> bool:
            due_s.append(one_s)
            return len(due_s) <= 2

        monkeypatch.setattr(zmq_stream, "STALL_S", 0.1)
        monkeypatch.setattr(suspension, "missed", missed)
        with RawPeer(gate) as peer:
            peer.generate(1, num_credits=0)
            submit = gate.begin()
            peer.receive(p.Accepted)
            gate.delta(submit, "a")
            assert peer.receive(p.Failed).failure.code == "stalled"
            waits_s = [round(later - earlier, 6) for earlier, later in itertools.pairwise(due_s)]
            assert len(waits_s) == 2 and min(waits_s) >= 0.1, "each time counts from then"
            gate.rig.receive("schedule", m.Abort)
            gate.finish(submit, finish=m.Finish.ABORT)
            gate.closed()

    def test_pending_output_of_a_full_connection_is_merged(self, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
        with RawPeer(gate, receive_bound=1) as slow:
            slow.generate(1, num_credits=1_000)
            submit = gate.begin()
            for _ in range(600):
                gate.delta(submit, "x" * 10_000)
                gate.rig.load()
            gate.finish(submit, "end")
            gate.closed()
            texts, num_deltas = "", 0
            slow.receive(p.Accepted)
            while not isinstance(message := slow.receive(), p.Finished):
                texts += message.outputs[0].text
                num_deltas += 1
            assert texts == "x" * 6_000_000 + "end"
            assert num_deltas < 601

    @pytest.mark.parametrize("what", ["ids", "output"])
    def test_what_an_aborted_request_has_for_a_full_connection_is_counted(
        self, gate: Gate, monkeypatch: pytest.MonkeyPatch, what: str
    ) -> None:
        """Otherwise a client that reads nothing could abort any number of requests, and the gateway would have the
        ids or the output of all of them."""
        send = listener.ZmtpListener.send
        is_stuck = False

        def stuck(self: Any, connection: Any, data: bytes) -> Any:
            return "full" if is_stuck else send(self, connection, data)

        monkeypatch.setattr(listener.ZmtpListener, "send", stuck)
        with RawPeer(gate) as peer:
            is_stuck = what == "ids"
            peer.generate(1)
            submit = gate.begin()
            if what == "output":
                peer.receive(p.Accepted)
                is_stuck = True
            gate.delta(submit, "x" * 100_000)
            gate.rig.load()
            num_before = open_bytes(gate)
            assert num_before > 100_000
            peer.send(p.Abort(1))
            assert gate.rig.receive("schedule", m.Abort).request_id == submit.request_id, "it computes no more"
            assert open_bytes(gate) >= num_before
            gate.finish(submit, finish=m.Finish.ABORT)
            gate.closed()
            assert open_bytes(gate) > 100_000, "the client has not read it"
            is_stuck = False
            if what == "ids":
                peer.receive(p.Accepted)
            (output,) = peer.receive(p.Delta).outputs
            assert (output.text, output.finish_reason) == ("x" * 100_000, "abort")
            assert isinstance(peer.receive(), p.Finished)
            assert open_bytes(gate) == 0
            assert peer.is_still_served()

    def test_retries_on_a_full_connection_back_off(self, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
        tried: list[str] = []
        send = listener.ZmtpListener.send

        def watched(self: Any, connection: Any, data: bytes) -> Any:
            result = "full" if is_stuck else send(self, connection, data)
            tried.append(result)
            return result

        is_stuck = False
        monkeypatch.setattr(listener.ZmtpListener, "send", watched)
        with RawPeer(gate) as peer:
            for request_id in range(20):
                peer.generate(request_id)
            submits = [gate.begin() for _ in range(20)]
            for _ in submits:
                peer.receive(p.Accepted)
            is_stuck = True
            tried.clear()
            begun = time.monotonic()
            while time.monotonic() < begun + 1.0:
                for submit in submits:
                    gate.delta(submit, "x")
                gate.rig.load()
            assert 3 <= tried.count("full") <= 12, "one attempt for all streams, with growing delays"
            is_stuck = False
            for submit in submits:
                gate.finish(submit, "end")
            ended = set()
            while len(ended) < 20:
                message = peer.receive()
                ended |= {message.request_id} if isinstance(message, p.Finished) else set()

    @pytest.mark.parametrize("limit", ["pending", "bytes", "time"])
    def test_a_client_that_reads_nothing_is_disconnected(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
    ) -> None:
        if limit == "time":
            monkeypatch.setattr(sweeper, "STALL_S", 0.2)
            monkeypatch.setattr(sweeper, "SWEEP_S", 0.05)
        elif limit == "bytes":
            monkeypatch.setattr(peer_sender, "MAX_PENDING_BYTES", 4000)
            monkeypatch.setattr(peer_sender, "MAX_PENDING_MESSAGES", 10**6)
        else:
            monkeypatch.setattr(peer_sender, "MAX_PENDING_MESSAGES", 20)
        with Gate(tmp_path) as gate, RawPeer(gate, receive_bound=1) as peer:
            bad = generate(1, "Hi", credits=1, model="x" * 150)
            data, end = msgspec.msgpack.encode(bad), time.monotonic() + PATIENCE_S
            num_sent = num_answers = 0
            while num_sent < 6_000 and peer.socket.poll(500, zmq.POLLOUT):  # otherwise the server has stopped reading
                peer.socket.send(data)
                num_sent += 1
            while not peer.is_disconnected(0):
                assert time.monotonic() < end, "it is not disconnected"
                num_answers += bool(peer.socket.poll(20) and peer.socket.recv())
            assert num_answers < num_sent
            assert is_served(gate)

    async def test_the_key_for_which_most_waits_loses_connections(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Else a key opens a thousand connections, and has the gateway keep errors of 100 kB in each."""
        monkeypatch.setattr(peer_sender, "MAX_PENDING_BYTES", 3000)
        sizes = {"greedy 1": 900, "greedy 2": 1000, "greedy 3": 800, "other": 1200}
        peers: dict[Any, ClientPeer] = {name: ClientPeer(cast(Any, name), 0.0) for name in sizes}
        ended = list[Any]()

        def end(peer: ClientPeer) -> None:
            ended.append(peer.connection)
            sender.forget(peers.pop(peer.connection))

        full = SimpleNamespace(send=lambda connection, data: "full")
        sender = peer_sender.PeerSender(cast(Any, full), peers, cast(Any, None), on_stuck=end, on_crowded=end)
        smallest = len(msgspec.msgpack.encode(p.Error(p.Failure(400, "x" * 256)))) - 256
        for name, peer in list(peers.items()):
            peer.scope = name.split()[0]
            sender.post(peer, p.Error(p.Failure(400, "x" * (sizes[name] - smallest))))
        assert (ended, sender.num_pending_bytes) == ([], 3900)
        sender._make_room()
        assert (ended, sender.num_pending_bytes) == (["greedy 2"], 2900)
        for peer in peers.values():
            sender.forget(peer)
        assert sender.num_pending_bytes == 0
