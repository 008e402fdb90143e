"""What ZeroMQ clients over tcp:// can make a gateway hold, before hello and behind it."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from pipeline.client import protocol as p
from pipeline.stages.gateway.zmq import listener, zmtp
from pipeline.stages.gateway.zmq import server as server_module
from tests.rig import PATIENCE_S
from tests.stages.gateway.crowd import ProcessRig
from tests.stages.gateway.gate import Gate
from tests.stages.gateway.peers import HELLO, RawPeer, free_port

MIB = 1024**2
MAX_MESSAGE_BYTES = 4 * MIB
ALLOWED_BYTES = 64 * MIB + listener.NUM_LARGE * MAX_MESSAGE_BYTES
"""What the gateway may grow by, whatever its clients send."""
HANDSHAKE = zmtp.GREETING + zmtp.ready(b"DEALER")
SAID_HELLO = zmtp.message(msgspec.msgpack.encode(HELLO))
PING = zmtp.message(msgspec.msgpack.encode(p.Ping(1)))
FLOODS = {
    "empty frames of one message": b"\x01\x00" * 32_768,
    "frames of 3 bytes": b"\x01\x03abc" * 16_384,
    "frames of 34 bytes": (b"\x01\x22" + bytes(34)) * 2_000,
    "large frames": b"\x03" + MIB.to_bytes(8, "big") + bytes(MIB),
    "commands": zmtp.command(b"SUBSCRIBE", b"x") * 5_000,
    "pings of ZMTP": zmtp.command(b"PING", bytes(18)) * 5_000,
    "properties": zmtp.command(b"READY", b"\x01a\x00\x00\x00\x01b" * 500) * 20,
    "whole messages": PING * 10_000,
    "large messages": zmtp.message(bytes(MAX_MESSAGE_BYTES)),
}
FLOOD_BYTES = 8 * MIB
"""By each of the connections: what was before took 32 times as much."""
NUM_FLOODS = 4


class Open:
    """A gateway in a process, with a ZeroMQ server over tcp://."""

    def __init__(self, gate: Gate, port: int) -> None:
        self.gate, self.place, self.address = gate, ("127.0.0.1", port), f"tcp://127.0.0.1:{port}"
        self._process = gate.rig.process  # type: ignore[attr-defined]
        with RawPeer(self.address) as peer:  # what is made once
            peer.say(p.Ping(1))
            peer.hear(p.Pong)
        self._begin_bytes = self._process.memory_info().rss

    def connect(self, *, hello: bool) -> socket.socket:
        connection = socket.create_connection(self.place, timeout=PATIENCE_S)
        connection.sendall(HANDSHAKE)
        heard = b""
        while b"READY" not in heard:
            heard += connection.recv(4096)
        if hello:
            connection.sendall(SAID_HELLO)
            while b"welcome" not in heard:
                heard += connection.recv(4096)
        return connection

    def growth(self) -> int:
        """At its most since the beginning."""
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        peak_kib = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
        return peak_kib * 1024 - int(self._begin_bytes)


@pytest.fixture
def zmq_server(tmp_path: Path) -> Iterator[Open]:
    port = free_port()
    address = f"tcp://127.0.0.1:{port}"
    with Gate(tmp_path, rig=ProcessRig, zmq=address, max_body_bytes=MAX_MESSAGE_BYTES) as gate:
        yield Open(gate, port)


def side_by_side(function: Callable[[], Any], num: int) -> None:
    threads = [threading.Thread(target=function, daemon=True) for _ in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("hello", [False, True], ids=["before hello", "behind hello"])
@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_at_full_speed_costs_little(zmq_server: Open, flood: str, hello: bool) -> None:
    def attack() -> None:
        end = time.monotonic() + 1.0  # some are only slowed down
        with zmq_server.connect(hello=hello) as connection, contextlib.suppress(OSError):
            connection.settimeout(1.0)
            num_sent = 0
            while num_sent < FLOOD_BYTES and time.monotonic() < end:
                num_sent += connection.send(FLOODS[flood])
            with RawPeer(zmq_server.address) as peer:
                assert peer.is_still_served()

    side_by_side(attack, NUM_FLOODS)
    assert zmq_server.growth() < 16 * MIB + listener.NUM_LARGE * MAX_MESSAGE_BYTES


@pytest.mark.parametrize("hello", [False, True], ids=["before hello", "behind hello"])
def test_messages_that_never_end_have_a_bound_together(zmq_server: Open, hello: bool) -> None:
    """As many connections as there may be, each with the most that it can have on its way."""
    large = zmtp.message(bytes(MAX_MESSAGE_BYTES))[: MIB - 1]
    small = zmtp.message(bytes(listener.SMALL_BYTES if hello else server_module.MAX_HELLO_BYTES))[:-1]
    with contextlib.ExitStack() as stack:
        for number in range(400):
            one = stack.enter_context(zmq_server.connect(hello=hello))
            one.settimeout(0.05)
            with contextlib.suppress(OSError):  # a large one is refused before hello, and waits behind it
                one.sendall(large if number % 8 == 0 else small)
        stack.enter_context(contextlib.suppress(OSError))
        with RawPeer(zmq_server.address) as peer:
            assert peer.is_still_served()
        assert zmq_server.growth() < ALLOWED_BYTES


def test_a_message_waits_for_room_and_then_comes_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "NUM_LARGE", 1)
    message = zmtp.message(msgspec.msgpack.encode(p.Generate(1, "x" * MIB, p.TextPrompt("Hi"), p.Params(), 1)))
    port = free_port()
    with Gate(tmp_path, zmq=f"tcp://127.0.0.1:{port}", max_body_bytes=MIB + 1000):
        address = f"tcp://127.0.0.1:{port}"

        def connect() -> socket.socket:
            connection = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
            connection.sendall(HANDSHAKE + SAID_HELLO)
            heard = b""
            while b"welcome" not in heard:
                heard += connection.recv(4096)
            return connection

        with connect() as slow, connect() as gone, connect() as waits:
            slow.sendall(message[:100_000])
            with RawPeer(address) as peer:  # what the first one has said is read
                assert peer.is_still_served()
            waits.settimeout(0.2)
            for one in (gone, waits):
                one.settimeout(0.2)
            with pytest.raises(TimeoutError):
                gone.sendall(message * 20)
            with pytest.raises(TimeoutError):
                waits.recv(1)
            gone.close()
            sender = threading.Thread(target=lambda: (waits.settimeout(PATIENCE_S), waits.sendall(message)))
            sender.start()
            with RawPeer(address) as peer:  # small ones need no room
                assert peer.is_still_served()
            slow.sendall(message[100_000:])
            slow.settimeout(PATIENCE_S)
            assert b"model_not_found" in slow.recv(65536)
            sender.join(PATIENCE_S)
            assert b"model_not_found" in waits.recv(65536)


def test_a_message_that_does_not_come_whole_in_time_ends_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MESSAGE_S", 0.3)
    monkeypatch.setattr(server_module, "SWEEP_S", 0.05)
    port = free_port()
    with Gate(tmp_path, zmq=f"tcp://127.0.0.1:{port}") as gate:
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as slow:
            slow.sendall(HANDSHAKE + SAID_HELLO + zmtp.message(bytes(100_000))[:50_000])
            heard = b""
            while more := slow.recv(4096):
                heard += more
        assert b"took more than 0.3 s" in heard
        with RawPeer(gate.rig.settings.gateway.zmq) as peer:
            assert peer.is_still_served()


@pytest.mark.parametrize("num_clients", [1, 12])
def test_the_largest_messages_sixteen_deep_are_all_answered(zmq_server: Open, num_clients: int) -> None:
    """Of clients that keep to the rules: libzmq's, with nothing but the kernel's buffers between."""
    empty = len(msgspec.msgpack.encode(p.Generate(1, "x" * 70_000, p.TextPrompt("Hi"), p.Params(), 1))) - 70_000

    def client() -> None:
        with RawPeer(zmq_server.address) as peer:
            peer.socket.setsockopt(zmq.SNDHWM, 0)
            size = peer.welcome.max_message_bytes - empty
            for number in range(16):
                data = msgspec.msgpack.encode(p.Generate(number, "x" * size, p.TextPrompt("Hi"), p.Params(), 1))
                assert len(data) == peer.welcome.max_message_bytes
                peer.say(data)
            failed = [peer.hear(p.Failed) for _ in range(16)]
            assert [one.request_id for one in failed] == list(range(16))
            assert {one.failure.code for one in failed} == {"model_not_found"}
            num_answered.append(16)

    num_answered: list[int] = []
    side_by_side(client, num_clients)
    assert sum(num_answered) == 16 * num_clients
    assert zmq_server.growth() < ALLOWED_BYTES


def test_heartbeats_of_zmtp_are_answered(zmq_server: Open) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.DEALER) as dealer:
        for option, value in ((zmq.LINGER, 0), (zmq.HEARTBEAT_IVL, 50), (zmq.HEARTBEAT_TIMEOUT, 400)):
            dealer.setsockopt(option, value)
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        dealer.connect(zmq_server.address)
        dealer.send(msgspec.msgpack.encode(HELLO))
        assert dealer.poll(int(PATIENCE_S * 1000))
        assert not monitor.poll(1000), "libzmq ends a connection whose heartbeats are not answered"
        dealer.disable_monitor()
        monitor.close()
