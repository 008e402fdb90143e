"""A gateway that a test plays: it sees each message of a client, and sends what the test chooses."""

import asyncio
import secrets
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio

from pipeline.client import protocol as p

T = TypeVar("T")

PATIENCE_S = 10.0
WELCOME = p.Welcome(
    version=2,
    server="pipeline/0",
    model="tiny",
    max_model_len=100,
    vocab_size=100,
    max_open_requests=8,
    max_message_bytes=100_000,
    max_credits=1024,
    heartbeat_s=5.0,
    silence_s=30.0,
    poolings=["last"],
)


def new_address() -> str:
    return f"ipc://@pipeline/test-{secrets.token_hex(8)}/zmq"


def ids(*each: int) -> bytes:
    return b"".join(one.to_bytes(4, "little") for one in each)


class FakeGateway:
    """Listens from `start` to `kill`, which may be repeated. For one client at a time."""

    def __init__(self, address: str = "", welcome: p.Welcome = WELCOME) -> None:
        self.address = address or new_address()
        self.welcome = welcome
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._decoder: msgspec.msgpack.Decoder[p.ClientMessage] = msgspec.msgpack.Decoder(p.ClientMessage)
        self._client = b""

    async def start(self) -> None:
        """Bind. Libzmq closes the last listener in another thread, so that the address may still be in use."""
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    self._socket.bind(self.address)
                    return
                except zmq.ZMQError:
                    await asyncio.sleep(0.005)

    def kill(self) -> None:
        """The connection breaks."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def restart(self) -> None:
        self.kill()
        await self.start()

    async def receive(self, what: type[T]) -> T:
        """The client's next message besides hello, which is answered, and pings. It must be a `what`."""
        assert self._socket is not None
        while True:
            async with asyncio.timeout(PATIENCE_S):
                self._client, data = await self._socket.recv_multipart()
            message = self._decoder.decode(data)
            if isinstance(message, p.Hello):
                await self.send(self.welcome)
                if what is p.Hello:
                    return message  # type: ignore[return-value]
            elif not isinstance(message, p.Ping):
                assert isinstance(message, what), message
                return message

    async def send(self, *messages: Any) -> None:
        assert self._socket is not None
        for message in messages:
            await self._socket.send_multipart([self._client, msgspec.msgpack.encode(message)])

    def close(self) -> None:
        self.kill()
        self._context.term()
