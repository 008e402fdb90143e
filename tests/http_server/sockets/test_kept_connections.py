"""What a connection keeps between two requests: nothing that a client can make large."""

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from pipeline.config.settings import GatewaySettings
from pipeline.http_server.listener import MAX_PIPELINED, HttpListener
from pipeline.http_server.rejection_log import RejectionLog
from pipeline.http_server.rules import ListenerRules
from pipeline.http_server.sockets.connections import HttpConnections
from pipeline.http_server.sockets.deliveries import Deliveries
from pipeline.http_server.sockets.slow_clients import UnreadReplies
from pipeline.runtime.security.tls import server_context
from tests.rig import PATIENCE_S

MAX_HEADER_BYTES = 8190
TLS = Path(__file__).parents[2] / "data/tls"
HOST = b"Host: localhost\r\n"


class Body(bytes):
    """Counts those that are kept."""

    num_kept = 0

    def __new__(cls, data: bytes) -> "Body":
        cls.num_kept += 1
        return super().__new__(cls, data)

    def __del__(self) -> None:
        type(self).num_kept -= 1


@asynccontextmanager
async def serving(
    handle: Callable[[web.Request], Awaitable[web.StreamResponse]],
    connections: HttpConnections | None = None,
    tls: ssl.SSLContext | None = None,
    **options: Any,
) -> AsyncIterator[tuple[str, int]]:
    """The address of a listener with one route."""
    app = web.Application(**options)
    app.router.add_route("*", "/", handle)
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)  # connections inherit it
    listener = HttpListener(
        app,
        sock,
        ListenerRules.admin(GatewaySettings(), RejectionLog(logging.getLogger("test"))),
        max_header_bytes=MAX_HEADER_BYTES,
        tls=tls,
        connections=HttpConnections() if connections is None else connections,
        unread=UnreadReplies(lambda: 2**26, 60.0, Deliveries(logging.getLogger("test"))),
    )
    address = sock.getsockname()
    await listener.start()
    try:
        yield address
    finally:
        await listener.cleanup()


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and body."""
    async with asyncio.timeout(PATIENCE_S):
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
        return int(head.split()[1]), await reader.readexactly(int(length))


async def test_a_reply_that_was_taken_is_not_kept_with_the_connection() -> None:
    async def large(_: web.Request) -> web.StreamResponse:
        return web.Response(body=Body(b"x" * 100_000))

    async with serving(large) as address:
        writers = []
        for _ in range(4):
            reader, writer = await asyncio.open_connection(*address)
            writers.append(writer)
            writer.write(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
            assert await answer(reader) == (200, b"x" * 100_000)
        async with asyncio.timeout(PATIENCE_S):
            while Body.num_kept:
                await asyncio.sleep(0.01)
        for writer in writers:  # the connections are open, and serve more
            assert not writer.transport.is_closing()
            writer.close()


def head(num_headers: int, header_bytes: int, end: bytes = b"\r\n") -> bytes:
    """Of a request with so many headers besides its host."""
    lines = (b"X-%d: %b\r\n" % (i, b"v" * header_bytes) for i in range(num_headers))
    return b"GET / HTTP/1.1\r\n" + HOST + b"".join(lines) + end


async def small(_: web.Request) -> web.StreamResponse:
    return web.Response(body=b"small")


@pytest.mark.parametrize("end", [b"\r\n", b""], ids=["whole", "arriving"])
@pytest.mark.parametrize("num_before", [0, 1])
async def test_a_large_head_of_many_headers_is_refused_also_before_it_ends(end: bytes, num_before: int) -> None:
    """Each header is within its limit."""
    async with serving(small) as address:
        reader, writer = await asyncio.open_connection(*address)
        for _ in range(num_before):
            writer.write(head(1, 10))
            assert await answer(reader) == (200, b"small")
        for begin in range(0, len(data := head(9, 8000, end)), 16 * 1024):
            writer.write(data[begin : begin + 16 * 1024])
            await asyncio.sleep(0.001)
        status, body = await answer(reader)
        assert status == 431 and b"65536 bytes" in body
        assert await reader.read() == b""
        writer.close()


async def test_a_head_that_is_larger_than_usual_is_served_and_not_kept() -> None:
    async with serving(small) as address:
        reader, writer = await asyncio.open_connection(*address)
        for num_headers in (1, 1, 7):
            writer.write(head(num_headers, 8000))
            assert await answer(reader) == (200, b"small")
        assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("piece", [30_000, 100_000, 300_000])
async def test_a_body_that_no_route_reads_is_not_a_head(piece: int) -> None:
    async with serving(small) as address:
        reader, writer = await asyncio.open_connection(*address)
        for _ in range(2):
            body = b"x" * 300_000
            writer.write(b"PUT / HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n")
            writer.write(b"Content-Length: %d\r\n\r\n" % len(body))
            assert await answer(reader) == (200, b"small")
            await asyncio.sleep(0.01)  # the head is read alone
            for begin in range(0, len(body), piece):
                writer.write(body[begin : begin + piece])
                await asyncio.sleep(0.01)
        writer.close()


async def test_requests_that_wait_on_their_connection_keep_little() -> None:
    """A client may send as many as it likes before it has the first reply, and gets all of them."""
    num_requests, body = 24, b"x" * 200_000
    goes_on = asyncio.Event()

    async def wait(request: web.Request) -> web.StreamResponse:
        await goes_on.wait()
        return web.Response(body=b"%d" % len(await request.read()))

    async with serving(wait, client_max_size=2**20) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
        head = (
            b"POST / HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        writer.write((head + body) * num_requests)
        num_left = -1
        while num_left != (num_left := writer.transport.get_write_buffer_size()):
            await asyncio.sleep(0.3)  # the server reads no more
        kept = num_requests * len(body) - num_left
        goes_on.set()
        replies = [await answer(reader) for _ in range(num_requests)]
        assert replies == [(200, b"%d" % len(body))] * num_requests
        writer.close()
    num_of_kernel = 4 * 2**17  # SO_SNDBUF and SO_RCVBUF, both doubled
    assert kept <= (MAX_PIPELINED + 1) * len(body) + 2**18 + num_of_kernel, kept


@pytest.mark.parametrize(
    "request_line", [b"not HTTP\r\n\r\n", b"GET / HTTP/1.1\r\n" + HOST + b"\r\n"], ids=["invalid", "fault"]
)
async def test_a_connection_whose_client_does_not_take_the_last_error_ends(
    request_line: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.http_server.listener.HEAD_S", 0.5)
    transports: list[Any] = []

    async def fail(request: web.Request) -> web.StreamResponse:
        transports.append(request.transport)
        if len(transports) > 1:
            raise ValueError("a fault of the route")
        return web.Response(body=b"small")

    connections = HttpConnections()
    async with serving(fail, connections) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
        assert await answer(reader) == (200, b"small")
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        with socket.socket(fileno=os.dup(transports[0].get_extra_info("socket").fileno())) as kernel:
            num_full = 0
            while num_full < 5:  # what the client's kernel takes makes room again
                try:
                    kernel.send(b"x" * 100)
                    num_full = 0
                except BlockingIOError:
                    num_full += 1
                    await asyncio.sleep(0.05)
            writer.write(request_line)
            assert len(connections) == 1
            async with asyncio.timeout(PATIENCE_S):
                while len(connections):
                    await asyncio.sleep(0.05)
        writer.close()


async def test_a_connection_that_makes_room_returns_its_descriptor_at_once() -> None:
    """Over TLS, whose end the client has to confirm."""
    sockets: list[Any] = []

    async def note(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        sockets.append(request.transport.get_extra_info("socket"))
        return web.Response(body=b"small")

    tls = server_context(GatewaySettings(ssl_certfile=str(TLS / "server.pem"), ssl_keyfile=str(TLS / "server.key")))
    context = ssl.create_default_context(cafile=TLS / "ca.pem")
    async with serving(note, HttpConnections(1), tls) as address:

        def ask() -> socket.socket:
            client = context.wrap_socket(socket.create_connection(address, PATIENCE_S), server_hostname="localhost")
            client.sendall(head(1, 10))
            assert client.recv(15) == b"HTTP/1.1 200 OK"
            return client

        clients = [await asyncio.to_thread(ask) for _ in range(2)]
        async with asyncio.timeout(10):
            while sockets[0].fileno() != -1:
                await asyncio.sleep(0.05)
        assert sockets[1].fileno() != -1
        for client in clients:
            client.close()
