"""The memory that ZeroMQ clients over tcp:// can make a gateway use, before and after hello."""

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
from pipeline.stages.gateway.zmq import frame_budget, handshake, listener, sweeper, zmtp
from tests.rig import PATIENCE_S
from tests.slices import part_of
from tests.stages.gateway.crowd import ProcessRig
from tests.stages.gateway.gate import Gate
from tests.stages.gateway.peers import HELLO, RawPeer, free_port
from tests.zmq_requests import generate

MIB = 1024**2
MAX_MESSAGE_BYTES = 4 * MIB
ALLOWED_BYTES = 64 * MIB + listener.NUM_LARGE * MAX_MESSAGE_BYTES
"""Limit of the gateway's memory growth, whatever its clients send."""
HANDSHAKE = zmtp.GREETING + zmtp.ready(b"DEALER")
HELLO_MESSAGE = zmtp.message(msgspec.msgpack.encode(HELLO))
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
"""Sent by each connection."""
NUM_FLOODS = 4


class ZmqGateway:
    """A gateway in a process, with a ZeroMQ server over tcp://."""

    def __init__(self, gate: Gate, port: int) -> None:
        self.gate, self.host_port, self.address = gate, ("127.0.0.1", port), f"tcp://127.0.0.1:{port}"
        self._process = gate.rig.process  # type: ignore[attr-defined]
        with RawPeer(self.address) as peer:  # one-time allocations
            peer.send(p.Ping(1))
            peer.receive(p.Pong)
        self._begin_bytes = self._process.memory_info().rss

    def connect(self, *, hello: bool) -> socket.socket:
        connection = socket.create_connection(self.host_port, timeout=PATIENCE_S)
        connection.sendall(HANDSHAKE)
        received = b""
        while b"READY" not in received:
            received += connection.recv(4096)
        if hello:
            connection.sendall(HELLO_MESSAGE)
            while b"welcome" not in received:
                received += connection.recv(4096)
        return connection

    def growth(self) -> int:
        """Growth of the peak memory since the beginning."""
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        peak_kib = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
        return peak_kib * 1024 - int(self._begin_bytes)


@pytest.fixture
def zmq_server(tmp_path: Path) -> Iterator[ZmqGateway]:
    port = free_port()
    address = f"tcp://127.0.0.1:{port}"
    with Gate(tmp_path, rig=ProcessRig, zmq=address, max_body_bytes=MAX_MESSAGE_BYTES) as gate:
        yield ZmqGateway(gate, port)


def side_by_side(function: Callable[[], Any], num: int) -> None:
    threads = [threading.Thread(target=function, daemon=True) for _ in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("hello", [False, True], ids=["before hello", "after hello"])
@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_at_full_speed_takes_little_memory(zmq_server: ZmqGateway, flood: str, hello: bool) -> None:
    def attack() -> None:
        end = time.monotonic() + 1.0  # some floods are only slowed down
        with zmq_server.connect(hello=hello) as connection, contextlib.suppress(OSError):
            connection.settimeout(1.0)
            num_sent = 0
            while num_sent < FLOOD_BYTES and time.monotonic() < end:
                num_sent += connection.send(FLOODS[flood])
            with RawPeer(zmq_server.address) as peer:
                assert peer.is_still_served()

    side_by_side(attack, NUM_FLOODS)
    assert zmq_server.growth() < 16 * MIB + listener.NUM_LARGE * MAX_MESSAGE_BYTES


@pytest.mark.parametrize("hello", [False, True], ids=["before hello", "after hello"])
def test_incomplete_messages_are_bounded_in_total(zmq_server: ZmqGateway, hello: bool) -> None:
    """The maximum number of connections, each with the largest incomplete message."""
    large = zmtp.message(bytes(MAX_MESSAGE_BYTES))[: MIB - 1]
    small = zmtp.message(bytes(listener.SMALL_BYTES if hello else handshake.MAX_HELLO_BYTES))[:-1]
    with contextlib.ExitStack() as stack:
        for number in range(400):
            one = stack.enter_context(zmq_server.connect(hello=hello))
            one.settimeout(0.05)
            with contextlib.suppress(OSError):  # a large one is refused before hello and waits after it
                one.sendall(large if number % 8 == 0 else small)
        stack.enter_context(contextlib.suppress(OSError))
        with RawPeer(zmq_server.address) as peer:
            assert peer.is_still_served()
        assert zmq_server.growth() < ALLOWED_BYTES


def test_a_large_message_waits_for_memory_and_is_then_received(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "NUM_LARGE", 1)
    monkeypatch.setattr(frame_budget, "GRACE_S", PATIENCE_S)  # no message is slow
    message = zmtp.message(msgspec.msgpack.encode(generate(1, "Hi", credits=1, model="x" * MIB)))
    port = free_port()
    with Gate(tmp_path, zmq=f"tcp://127.0.0.1:{port}", max_body_bytes=MIB + 1000):
        address = f"tcp://127.0.0.1:{port}"

        def connect() -> socket.socket:
            connection = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
            connection.sendall(HANDSHAKE + HELLO_MESSAGE)
            received = b""
            while b"welcome" not in received:
                received += connection.recv(4096)
            return connection

        with connect() as slow, connect() as gone, connect() as waits:
            slow.sendall(message[:-100])  # it has all of the budget
            gone.sendall(message[:-100])  # the one that may exceed it
            with RawPeer(address) as peer:  # both have been read
                assert peer.is_still_served()
            sender = threading.Thread(target=lambda: waits.sendall(message))
            sender.start()
            waits.settimeout(0.2)
            with pytest.raises(TimeoutError):
                waits.recv(1)
            with RawPeer(address) as peer:  # small ones do not wait
                assert peer.is_still_served()
            gone.close()
            waits.settimeout(PATIENCE_S)
            sender.join(PATIENCE_S)
            assert b"model_not_found" in waits.recv(65536)
            slow.sendall(message[-100:])
            assert b"model_not_found" in slow.recv(65536)


def test_a_message_that_is_incomplete_for_too_long_ends_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeper, "MESSAGE_S", 0.3)
    monkeypatch.setattr(sweeper, "SWEEP_S", 0.05)
    port = free_port()
    with Gate(tmp_path, zmq=f"tcp://127.0.0.1:{port}") as gate:
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as slow:
            slow.sendall(HANDSHAKE + HELLO_MESSAGE + zmtp.message(bytes(100_000))[:50_000])
            received = b""
            while more := slow.recv(4096):
                received += more
        assert b"took more than 0.3 s" in received
        with RawPeer(gate.rig.settings.gateway.zmq) as peer:
            assert peer.is_still_served()


@pytest.mark.parametrize("num_clients", [1, part_of(12, 6)])
def test_sixteen_pipelined_messages_of_the_maximum_size_are_answered(zmq_server: ZmqGateway, num_clients: int) -> None:
    """The clients obey the protocol: they use libzmq, with only the kernel's buffers in between."""
    empty = len(msgspec.msgpack.encode(generate(1, "Hi", credits=1, model="x" * 70_000))) - 70_000

    def client() -> None:
        with RawPeer(zmq_server.address) as peer:
            peer.socket.setsockopt(zmq.SNDHWM, 0)
            size = peer.welcome.max_message_bytes - empty
            for number in range(16):
                data = msgspec.msgpack.encode(generate(number, "Hi", credits=1, model="x" * size))
                assert len(data) == peer.welcome.max_message_bytes
                peer.send(data)
            failed = [peer.receive(p.Failed) for _ in range(16)]
            assert [one.request_id for one in failed] == list(range(16))
            assert {one.failure.code for one in failed} == {"model_not_found"}
            num_answered.append(16)

    num_answered: list[int] = []
    side_by_side(client, num_clients)
    assert sum(num_answered) == 16 * num_clients
    assert zmq_server.growth() < ALLOWED_BYTES


def test_zmtp_heartbeats_are_answered(zmq_server: ZmqGateway) -> None:
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
