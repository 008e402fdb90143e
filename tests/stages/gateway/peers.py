"""ZeroMQ clients that send what a test chooses, and helpers for the tests that use them."""

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import msgspec
import zmq

from pipeline.client import protocol as p
from pipeline.client.connection.stream import Stream
from pipeline.client.connection.wire import OutputDelta
from pipeline.runtime import messages as m
from tests.rig import PATIENCE_S
from tests.stages.gateway.gate import Gate

HELLO = p.Hello(2, 2, "a test")


class RawPeer:
    """A DEALER socket as a context manager that connects and disconnects."""

    def __init__(self, gate: Gate | str, *, receive_bound: int = 1000, hello: bool = True) -> None:
        address = gate if isinstance(gate, str) else f"ipc://@pipeline/{gate.address[1]}/zmq"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, receive_bound)
        self.socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._decoder: msgspec.msgpack.Decoder[p.ServerMessage] = msgspec.msgpack.Decoder(p.ServerMessage)
        self.socket.connect(address)
        if hello:
            self.send(HELLO)
            self.welcome: p.Welcome = self.receive(p.Welcome)

    def send(self, *frames: Any) -> None:
        """Send the frames of one message: structs are encoded, bytes are sent unchanged."""
        data = [frame if isinstance(frame, bytes) else msgspec.msgpack.encode(frame) for frame in frames]
        self.socket.send_multipart(data)

    def generate(self, request_id: int = 1, prompt: str = "Hi", num_credits: int = 100, **params: Any) -> None:
        self.send(p.Generate(request_id, p.Request(prompt=prompt, **params), num_credits))

    def receive(self, what: Any = None, timeout_s: float = PATIENCE_S) -> Any:
        """The next message, which must be of type `what`."""
        assert self.socket.poll(int(timeout_s * 1000)), f"no {what} was received"
        message = self._decoder.decode(self.socket.recv())
        assert what is None or isinstance(message, what), message
        return message

    def receives_nothing(self, while_s: float = 0.1) -> bool:
        return not self.socket.poll(int(while_s * 1000))

    def is_still_served(self) -> bool:
        """Whether a ping is answered, after all earlier messages."""
        self.send(p.Ping(77))
        return bool(self.receive(p.Pong) == p.Pong(77))

    def is_disconnected(self, timeout_s: float = PATIENCE_S) -> bool:
        """Wait until the server has ended the connection."""
        return bool(self._monitor.poll(int(timeout_s * 1000)))

    def __enter__(self) -> "RawPeer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.socket.disable_monitor()
        self._monitor.close()
        self.socket.close()
        self._context.term()


def until(condition: Any, what: str, timeout_s: float = PATIENCE_S) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.005)


def address_of(gate: Gate) -> str:
    return f"ipc://@pipeline/{gate.address[1]}/zmq"


async def do(function: Any, *args: Any) -> Any:
    """Play the stages without blocking the client's loop."""
    return await asyncio.wait_for(asyncio.to_thread(function, *args), PATIENCE_S)


async def all_of(stream: Stream) -> list[OutputDelta]:
    async with asyncio.timeout(PATIENCE_S):
        return [output async for output in stream]


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
"""ZMTP 3.0, no security."""


_PROPERTY = b"\x0bSocket-Type\x00\x00\x00\x06DEALER"


READY = bytes([4, len(_PROPERTY) + 6]) + b"\x05READY" + _PROPERTY


class TcpPeer:
    """A ZMTP client over plain TCP that can reset the connection."""

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
        self._socket.sendall(GREETING + READY)
        received = b""
        while b"READY" not in received:  # libzmq accepts no message before it has sent READY
            received += self._socket.recv(4096)

    def send(self, message: Any) -> None:
        data = msgspec.msgpack.encode(message)
        self._socket.sendall(bytes([0, len(data)]) + data)

    def reset(self) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def __enter__(self) -> "TcpPeer":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


@contextlib.contextmanager
def named_dealer(gate: Gate) -> Iterator[Any]:
    """A client that sets its own routing id."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.ROUTING_ID, b"me")
        dealer.connect(address_of(gate))
        yield dealer


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def is_served(gate: Gate) -> bool:
    """Whether a new client is served."""
    with RawPeer(gate, hello=False) as peer:
        peer.send(HELLO)
        return bool(peer.socket.poll(1000)) and isinstance(peer.receive(), p.Welcome)


def is_open(gate: Gate) -> bool:
    """Play stages that end aborted requests. Returns whether any request is still open."""
    while not gate.rig.nothing("ingest", 0):
        message = gate.rig.receive("ingest")
        for index in range(message.options.n if isinstance(message, m.Submit) else 0):
            gate.finish(message, index=index, finish=m.Finish.ABORT)
    return bool(gate.rig.load().num_open_requests)
