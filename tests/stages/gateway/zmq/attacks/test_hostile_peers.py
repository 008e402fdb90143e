"""Peers that violate the protocol lose their connection; others are not affected."""

import contextlib
import random
import resource
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import zmq

from pipeline.client import protocol as p
from pipeline.runtime import messages as m
from pipeline.stages.gateway.zmq import listener, sweeper
from pipeline.stages.gateway.zmq.peer import ClientPeer
from tests.rig import PATIENCE_S
from tests.stages.gateway.gate import MODEL, Gate
from tests.stages.gateway.peers import GREETING, HELLO, READY, RawPeer, is_open, is_served, named_dealer, until
from tests.zmq_requests import chat, generate

CLIENT_MESSAGES = [
    generate(1, "Hi", credits=10),
    generate(2, bytes(8), {"n": 2, "seed": 5, "stop": ["a"]}, 0, [bytes(4), b""], model=MODEL),
    generate(3, chat([p.MessageParam("user", "Hi")]), credits=10),
    p.Abort(1),
    p.Credit(1, 5),
    p.Ping(9),
]


class TestHostilePeers:
    @pytest.mark.parametrize(
        ("data", "words"),
        [
            (b"", "malformed"),
            (b"\xc1", "malformed"),
            (b"\xff" * 1000, "malformed"),
            (b"\x91" * 5000, "malformed"),
            (msgspec.msgpack.encode(["sing", 1]), "malformed"),
            (msgspec.msgpack.encode({"kind": "hello"}), "malformed"),
            (msgspec.msgpack.encode(["hello", "1", 1]), "hello.min_version"),
            (msgspec.msgpack.encode(["hello", 1]), "malformed"),
            (b"\x94\xa5hello\x01\x01\xa2\xff\xfe", "malformed"),
            (msgspec.msgpack.encode(p.Ping(1)), "must be hello"),
            (msgspec.msgpack.encode(generate(1, "Hi", credits=1)), "must be hello"),
            (msgspec.msgpack.encode(p.Hello(3, 9)), "speaks version 2"),
        ],
    )
    def test_an_invalid_first_message_gets_an_error_and_a_disconnect(self, gate: Gate, data: bytes, words: str) -> None:
        with RawPeer(gate, hello=False) as peer:
            peer.send(data)
            failure = peer.receive(p.Error).failure
            assert failure.status == 400
            assert words in failure.message
            assert peer.is_disconnected()
        assert is_served(gate)

    @pytest.mark.parametrize(
        ("frames", "words"),
        [
            ((b"garbage",), "malformed"),
            ((HELLO,), "hello was already sent"),
            ((b"", b"\x92\xa4ping\x01"), "use a DEALER"),
            ((msgspec.msgpack.encode(["generate", 1, {"prompt": ""}, "1"]),), "generate.credits"),
            ((msgspec.msgpack.encode(["generate", 1, {"prompt": ""}, -1]),), "generate.credits"),
            ((msgspec.msgpack.encode(["generate", -1, {"prompt": ""}, 1]),), "generate.request_id"),
            ((msgspec.msgpack.encode(["generate", 1, {"prompt": ""}])[:-1],), "malformed"),
            ((msgspec.msgpack.encode(["credit", 1, -5]),), "credit.num_deltas"),
        ],
    )
    def test_a_later_violation_aborts_the_peers_requests(self, gate: Gate, frames: tuple[Any, ...], words: str) -> None:
        with RawPeer(gate) as peer:
            peer.generate(1)
            submit = gate.begin()
            peer.receive(p.Accepted)
            peer.send(*frames)
            assert words in peer.receive(p.Error).failure.message
            assert peer.is_disconnected()
            assert gate.rig.receive("schedule", m.Abort).request_id == submit.request_id
        assert is_served(gate)

    def test_the_id_of_an_open_request_cannot_be_reused(self, gate: Gate) -> None:
        with RawPeer(gate) as peer:
            peer.generate(1)
            gate.begin()
            peer.receive(p.Accepted)
            peer.generate(1)
            assert peer.receive(p.Error).failure.code == "duplicate_id"
            assert peer.is_disconnected()
        assert is_served(gate)

    def test_two_clients_may_use_the_same_ids(self, gate: Gate) -> None:
        with RawPeer(gate) as one, RawPeer(gate) as other:
            one.generate(1)
            first = gate.begin()
            other.generate(1)
            second = gate.begin()
            gate.finish(second, "second")
            gate.finish(first, "first")
            for peer, text in ((one, "first"), (other, "second")):
                peer.receive(p.Accepted)
                assert peer.receive(p.Delta).outputs[0].text == text

    def test_a_too_large_message_ends_only_its_connection(self, tmp_path: Path) -> None:
        with Gate(tmp_path, max_body_bytes=4096) as gate, RawPeer(gate) as good, RawPeer(gate) as peer:
            assert peer.welcome.max_message_bytes == 4096
            peer.generate(1, "x" * 5000)
            assert peer.is_disconnected()
            assert good.is_still_served()

    def test_a_client_cannot_take_over_another_by_its_routing_id(self, gate: Gate) -> None:
        with named_dealer(gate) as one:
            one.send(msgspec.msgpack.encode(HELLO))
            assert one.poll(PATIENCE_S * 1000)
            one.recv()
            with named_dealer(gate) as thief:
                thief.send(msgspec.msgpack.encode(HELLO))
                assert thief.poll(PATIENCE_S * 1000)
                thief.send(msgspec.msgpack.encode(p.Ping(4)))
                thief.send(msgspec.msgpack.encode(p.Bye()))
                assert not one.poll(200)
                one.send(msgspec.msgpack.encode(p.Ping(3)))
                assert one.poll(PATIENCE_S * 1000)
                assert msgspec.msgpack.decode(one.recv()) == ["pong", 3]

    def test_connections_without_hello_are_closed_in_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sweeper, "HELLO_S", 0.5)
        monkeypatch.setattr(sweeper, "SWEEP_S", 0.05)
        num = min(1_000, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 3)
        with Gate(tmp_path) as gate, contextlib.ExitStack() as stack, RawPeer(gate) as good:
            silent = []
            for _ in range(num):
                one = stack.enter_context(socket.socket(socket.AF_UNIX))
                one.connect(f"\0pipeline/{gate.address[1]}/zmq")
                one.settimeout(PATIENCE_S)
                silent.append(one)
            # Half of them send the ZMTP handshake and then nothing; libzmq would keep those open forever.
            for one in silent[::2]:
                one.sendall(GREETING + READY)
            for one in silent:
                # The server's greeting, then its end: a reset, if it has not read what was sent.
                with contextlib.suppress(ConnectionResetError):
                    while one.recv(4096):
                        pass
            assert good.is_still_served()

    def test_connections_above_the_limit_are_closed_at_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(listener, "MAX_CONNECTIONS", 3)
        with Gate(tmp_path) as gate, contextlib.ExitStack() as stack:
            served = [stack.enter_context(RawPeer(gate)) for _ in range(3)]
            one = stack.enter_context(RawPeer(gate, hello=False))
            assert one.is_disconnected()
            assert all(peer.is_still_served() for peer in served)
            served[0].__exit__(None, None, None)
            stack.pop_all()
            for peer in served[1:]:
                peer.__exit__(None, None, None)
            one.__exit__(None, None, None)
            until(lambda: is_served(gate), "a new connection is accepted")

    def test_a_silent_peer_is_disconnected_and_a_pinging_one_is_not(
        self, gate: Gate, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sweeper, "SILENCE_S", 0.4)
        monkeypatch.setattr(sweeper, "SWEEP_S", 0.05)
        with RawPeer(gate) as silent, RawPeer(gate) as lively:
            silent.generate(1)
            submit = gate.begin()
            silent.receive(p.Accepted)
            while silent.receives_nothing(0.05):
                assert lively.is_still_served()
            assert silent.receive(p.Error).failure.code == "silent"
            assert silent.is_disconnected()
            assert gate.rig.receive("schedule", m.Abort).request_id == submit.request_id
            assert lively.is_still_served()

    async def test_a_client_may_be_silent_while_all_processes_are_suspended(self) -> None:
        now_s, paused_s = time.monotonic(), 100.0
        connection: Any = SimpleNamespace(opened_s=now_s - 200.0, begun_s=None, is_waiting=False)
        peer, dropped = ClientPeer(connection, now_s - paused_s - 10.0), list[Any]()
        peer.is_welcome = True
        no_sockets: Any = SimpleNamespace(give_up_slow=lambda: None, num_connections=0)

        def drop(_: ClientPeer, error: Any = None) -> None:
            dropped.append(error)

        checks: Any = sweeper.Sweeper(no_sockets, {cast(Any, "it"): peer}, drop=drop, disconnect=drop)
        checks._loop = SimpleNamespace(time=lambda: now_s)
        for late_s, after_s, codes in (
            (paused_s, 0.0, []),
            (0.0, 0.1, []),
            (0.0, sweeper.SILENCE_S - 11.0, []),
            (0.0, 2.0, ["silent"]),
        ):
            now_s += after_s
            due_s = now_s - late_s
            checks._timer = SimpleNamespace(when=lambda due_s=due_s: due_s)
            checks._sweep()
            assert [error.code for error in dropped] == codes

    def test_a_flood_of_pings_does_not_starve_others(self, gate: Gate) -> None:
        with RawPeer(gate) as flood, RawPeer(gate) as other:
            ping = msgspec.msgpack.encode(p.Ping(1))
            for _ in range(20_000):
                try:
                    flood.socket.send(ping, zmq.NOBLOCK)
                except zmq.Again:
                    break
            assert other.is_still_served()
        assert is_served(gate)

    def test_invalid_bytes_disconnect_only_their_sender(self, gate: Gate) -> None:
        chance = random.Random(5)
        samples = [msgspec.msgpack.encode(message) for message in CLIENT_MESSAGES]
        with RawPeer(gate) as good:
            for _ in range(30):
                data = bytearray(chance.choice(samples))
                for _ in range(chance.randrange(1, 4)):
                    data[chance.randrange(len(data))] = chance.randrange(256)
                with RawPeer(gate) as peer:
                    peer.send(bytes(data))
                    peer.send(b"\xc1")
                    assert peer.is_disconnected()
            assert good.is_still_served()
        until(lambda: not is_open(gate), f"all are aborted: {gate.rig.load()}")
