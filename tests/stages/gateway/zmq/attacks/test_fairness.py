"""Peers that announce, stall, flood or connect without end don't make others wait."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.client import protocol as p
from pipeline.stages.gateway.zmq import frame_budget, listener, sweeper, zmtp
from pipeline.stages.gateway.zmq import server as server_module
from pipeline.stages.gateway.zmq.connection import Connection
from tests.rig import PATIENCE_S
from tests.stages.gateway.gate import Gate
from tests.stages.gateway.http.access.test_guard import KEY, SECOND, locked
from tests.stages.gateway.peers import GREETING, READY, RawPeer, free_port, until
from tests.zmq_requests import generate

MIB = 1024**2
LARGE = zmtp.message(msgspec.msgpack.encode(generate(1, "Hi", credits=1, model="x" * MIB)))
"""Answered with "model_not_found"."""


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Of a gateway with two keys and room for two large messages."""
    address = f"tcp://127.0.0.1:{free_port()}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listener, "NUM_LARGE", 2)
        with locked(tmp_path, zmq=address, max_body_bytes=MIB + 1000):
            yield address


def connect(address: str, key: str | None = KEY) -> socket.socket:
    """A connection that has sent hello, if there is a key."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
    connection.sendall(GREETING + READY)
    if key is not None:
        connection.sendall(zmtp.message(msgspec.msgpack.encode(p.Hello(2, 2, "a test", key))))
        read_until(connection, b"welcome")
    else:
        read_until(connection, b"READY")
    return connection


def read_until(connection: socket.socket, words: bytes) -> bytes:
    received = b""
    while words not in received:
        part = connection.recv(65536)
        assert part, f"the connection has ended, after {received!r}"
        received += part
    return received


def is_answered(connection: socket.socket) -> bool:
    connection.sendall(LARGE)
    return bool(read_until(connection, b"model_not_found"))


def peer(address: str, key: str = SECOND) -> RawPeer:
    one = RawPeer(address, hello=False)
    one.send(p.Hello(2, 2, "a test", key))
    one.welcome = one.receive(p.Welcome)
    return one


def test_announced_frames_take_no_room(address: str) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(connect(address)).sendall(LARGE[:1000])
        for key in (KEY, SECOND):
            assert is_answered(stack.enter_context(connect(address, key)))


def test_stalled_frames_of_a_key_do_not_delay_another_key(address: str) -> None:
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame_budget, "GRACE_S", PATIENCE_S)  # nothing is slow
        for _ in range(20):
            one = stack.enter_context(connect(address))
            one.settimeout(0.05)
            with contextlib.suppress(TimeoutError):  # some wait for room
                one.sendall(LARGE[:-100])
        assert is_answered(stack.enter_context(connect(address, SECOND)))


def test_stalled_frames_are_given_up_if_others_wait(address: str, caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame_budget, "GRACE_S", 0.3)
        patch.setattr(frame_budget, "MIN_BYTES_PER_S", 2**40)
        patch.setattr(sweeper, "SWEEP_S", 0.02)
        stalled = [stack.enter_context(connect(address)) for _ in range(3)]
        for one in stalled:
            one.sendall(LARGE[:-100])
        with connect(address) as last:  # of the same key
            assert is_answered(last)
        given_up = [one for one in stalled if b"slower than" in received(one)]
        assert given_up, "the slowest gets an error"
        assert len(given_up) < 3, "only as many as needed"
    until(lambda: "their messages arrived too slowly" in str([one.__dict__ for one in caplog.records]), "a log line")


def received(connection: socket.socket) -> bytes:
    """What has arrived within a moment."""
    connection.settimeout(0.3)
    data = b""
    with contextlib.suppress(TimeoutError):
        while part := connection.recv(65536):
            data += part
    return data


def test_a_message_may_pause_as_long_as_no_other_waits(address: str) -> None:
    with pytest.MonkeyPatch.context() as patch, connect(address) as slow, peer(address) as other:
        patch.setattr(frame_budget, "GRACE_S", 0.0)
        slow.sendall(LARGE[:-100])
        for _ in range(3):
            assert other.is_still_served()
        slow.sendall(LARGE[-100:])
        assert read_until(slow, b"model_not_found")


def test_small_messages_of_one_key_do_not_queue_before_another_key(address: str) -> None:
    """Forty connections with many messages each wait for their turns; the other key's turn comes next."""
    order: list[str] = []
    really_handle, really_read = server_module.ZmqServer._handle, listener.ZmtpListener.read

    def handle(server: Any, client: Any, message: Any, data: Any) -> None:
        if isinstance(message, p.Ping):
            order.append("flood" if message.nonce else "other")
        really_handle(server, client, message, data)

    def read(owner: listener.ZmtpListener, connection: Connection) -> None:
        transport = connection.transport
        if transport is not None and transport.get_extra_info("peername") == name and connection.num_arrived:
            order.append("arrived")
        really_read(owner, connection)

    ping = zmtp.message(msgspec.msgpack.encode(p.Ping(1)))
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr(listener, "MAX_TURN_MESSAGES", 1)
        flood = [stack.enter_context(connect(address)) for _ in range(40)]
        other = stack.enter_context(connect(address, SECOND))
        name = other.getsockname()
        patch.setattr(server_module.ZmqServer, "_handle", handle)
        patch.setattr(listener.ZmtpListener, "read", read)
        for one in flood:
            one.sendall(ping * 500)
        until(lambda: len(order) > 100, "the flood has begun")
        other.sendall(zmtp.message(msgspec.msgpack.encode(p.Ping(0))))
        read_until(other, b"pong")
        begin, end = order.index("arrived"), order.index("other")
        assert order[begin:end].count("flood") <= 3
        until(lambda: order.count("flood") == 40 * 500, "all are handled")


class TestCapacity:
    @pytest.fixture(autouse=True)
    def low_capacity(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(listener, "MAX_CONNECTIONS", 8)

    def test_connections_without_hello_keep_no_places_from_others(self, address: str) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(8):
                stack.enter_context(connect(address, None))
            with peer(address) as other:
                assert other.is_still_served()

    def test_idle_connections_of_a_key_make_room(self, address: str) -> None:
        with contextlib.ExitStack() as stack:
            idle = [stack.enter_context(connect(address)) for _ in range(7)]
            first = stack.enter_context(peer(address))
            others = [stack.enter_context(peer(address)) for _ in range(3)]
            for one in (first, *others):
                assert one.is_still_served(), "the key with most connections loses some, not the other"
            for closed in idle[:3]:
                assert b"another client needed this connection's place" in received(closed)

    def test_connections_with_open_requests_stay(self, tmp_path: Path) -> None:
        address = f"tcp://127.0.0.1:{free_port()}"
        with Gate(tmp_path, zmq=address) as gate, contextlib.ExitStack() as stack:
            busy = [stack.enter_context(RawPeer(address)) for _ in range(8)]
            submits = []
            for one in busy:
                one.generate(1)
                submits.append(gate.begin())
                one.receive(p.Accepted)
            with RawPeer(address, hello=False) as refused:
                refused.send(p.Hello(2, 2, "a test"))
                assert refused.is_disconnected()
            for one, submit in zip(busy, submits, strict=True):
                gate.finish(submit, " there")
                assert one.receive(p.Delta) and one.receive(p.Finished)
