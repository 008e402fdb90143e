"""Connections begin in turns: a flood of one client doesn't stop others. So does each step of a TLS handshake."""

import asyncio
import errno
import itertools
import os
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, closing, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from aiohttp import web

from pipeline.config.settings import GatewaySettings
from pipeline.http_server.listener import HttpConnection
from pipeline.http_server.sockets import arrivals, read_steps
from pipeline.http_server.sockets.arrivals import MAX_UNTAKEN_BYTES, Arrivals, Handshake
from pipeline.http_server.sockets.connections import NUM_HANDSHAKES, HttpConnections
from pipeline.http_server.sockets.read_steps import STEP_BYTES
from pipeline.http_server.sockets.receive_turns import NUM_READS
from pipeline.runtime.security.tls import server_context
from tests.http_server.sockets.test_kept_connections import serving
from tests.rig import PATIENCE_S
from tests.runtime.security.test_tls import CA, CERT, KEY

NUM_FLOOD = 60
LOOPS = pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
TLS: Any = server_context(GatewaySettings(ssl_certfile=str(CERT), ssl_keyfile=str(KEY)))


def in_loop(make_loop: Callable[[], asyncio.AbstractEventLoop], test: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await test()

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(within())


async def answer(request: web.Request) -> web.StreamResponse:
    return web.Response(body=bytes(len(await request.read())))


def hello(**options: Any) -> bytes:
    """What a client sends first."""
    context = ssl.create_default_context(cafile=CA)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


async def ask(address: tuple[str, int], body: bytes = b"", *, is_tls: bool = True, is_chunked: bool = False) -> bytes:
    """A request of a client; returns the reply."""
    options: Any = {"ssl": ssl.create_default_context(cafile=CA), "server_hostname": "localhost"} if is_tls else {}
    reader, writer = await asyncio.open_connection(*address, **options)
    head = "POST / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    if is_chunked:
        head, body = f"{head}Transfer-Encoding: chunked\r\n", b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    else:
        head += f"Content-Length: {len(body)}\r\n"
    writer.write(f"{head}\r\n".encode() + body)
    reply = await reader.read()
    writer.close()
    return reply


@LOOPS
def test_requests_and_uploads_arrive_over_tls(make_loop: Any) -> None:
    async def test() -> None:
        async with serving(answer, tls=TLS, client_max_size=2**24) as address:
            for size in (0, 1, 20_000, 1_000_000):
                assert len((await ask(address, b"x" * size)).partition(b"\r\n\r\n")[2]) == size
            replies = await asyncio.gather(*(ask(address, b"x" * 300_000) for _ in range(5)))
            assert {len(reply.partition(b"\r\n\r\n")[2]) for reply in replies} == {300_000}

    in_loop(make_loop, test)


@LOOPS
@pytest.mark.parametrize("is_tls", [True, False], ids=["tls", "plain"])
@pytest.mark.parametrize("is_cheap", [True, False], ids=["cheap", "dear"])
def test_a_connection_is_read_in_small_steps_and_once_in_a_turn_if_they_are_dear(
    make_loop: Any, is_cheap: bool, is_tls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of 256 KiB may be ten thousand updates of the keys: decrypting those takes 0.2 s. Or they are 2,000
    headers, which take 8 ms."""
    steps: list[list[int]] = [[]]
    updated, received = Handshake.buffer_updated, HttpConnection.data_received
    seconds = itertools.count(step=0 if is_cheap else 1)
    clock = SimpleNamespace(monotonic=time.monotonic, thread_time=lambda: float(next(seconds)))
    monkeypatch.setattr(read_steps, "time", clock)

    def counted(self: Handshake, nbytes: int) -> None:
        steps[-1].append(nbytes)
        updated(self, nbytes)

    def counted_plain(self: HttpConnection, data: bytes) -> None:
        if data:
            steps[-1].append(len(data))
        received(self, data)

    monkeypatch.setattr(Handshake, "buffer_updated", counted)
    if not is_tls:
        monkeypatch.setattr(HttpConnection, "data_received", counted_plain)

    async def test() -> None:
        loop = asyncio.get_running_loop()

        def next_turn() -> None:
            steps.append([])
            time.sleep(0.002)
            loop.call_soon(next_turn)

        async with serving(answer, tls=TLS if is_tls else None, client_max_size=2**24) as address:
            next_turn()
            reply = await ask(address, b"x" * 600_000, is_tls=is_tls, is_chunked=True)
            assert len(reply.partition(b"\r\n\r\n")[2]) == 600_000

    in_loop(make_loop, test)
    assert max(max(turn, default=0) for turn in steps) <= STEP_BYTES
    most = max(len(turn) for turn in steps)
    assert most > 4 if is_cheap else most <= 2, most


class FakeTls:
    """The inner protocol of a handshake, or the protocol above, or the transport."""

    num_read = 0
    is_paused = False

    def __init__(self) -> None:
        self.buffer = bytearray(STEP_BYTES)
        self.is_aborted = False

    def get_buffer(self, sizehint: int) -> bytearray:
        return self.buffer

    def abort(self) -> None:
        self.is_aborted = True

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def test_a_client_that_sends_no_data_over_tls_and_takes_nothing_is_ended() -> None:
    """Each update of the keys may ask for one of the server's, which memory would keep."""
    transport, above = FakeTls(), FakeTls()
    loop = asyncio.new_event_loop()
    with closing(loop), pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "get_running_loop", lambda: loop)
        shake: Any = Handshake(FakeTls, HttpConnections(), TLS, 1.0)
        shake._transport, shake._inner, shake._protocol = transport, FakeTls(), above
        num_steps = 2 * MAX_UNTAKEN_BYTES // STEP_BYTES

        def read(num_data: int) -> None:
            shake._inner.buffer_updated = lambda _: setattr(above, "num_read", num_data)
            for _ in range(num_steps):
                shake.buffer_updated(STEP_BYTES)

        read(0)  # what it takes is not kept
        shake.pause_writing()
        read(STEP_BYTES - 40)  # an upload
        shake.resume_writing()
        read(0)
        assert not transport.is_aborted
        shake.pause_writing()
        read(1)
        assert transport.is_aborted


@LOOPS
def test_a_flood_of_copied_handshakes_takes_one_step_in_a_turn_of_the_loop(
    make_loop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All have arrived when the loop looks: some in two pieces, some that begin with another curve. Others get their
    turn in between, and when they are gone, nothing is left of them."""
    steps: list[int] = []
    updated = Handshake.buffer_updated

    def counted(self: Handshake, nbytes: int) -> None:
        steps[-1] += self._protocol is None
        updated(self, nbytes)

    async def test() -> None:
        connections = HttpConnections()
        loop = asyncio.get_running_loop()

        def next_turn() -> None:
            steps.append(0)
            loop.call_soon(next_turn)

        next_turn()
        monkeypatch.setattr(Handshake, "buffer_updated", counted)
        async with serving(answer, connections, tls=TLS) as address:
            data = hello()
            with ExitStack() as stack:
                flood = [stack.enter_context(socket.create_connection(address)) for _ in range(NUM_FLOOD)]
                for index, one in enumerate(flood):
                    one.sendall(data[:100] if index % 2 else data)
                while len(connections) < NUM_FLOOD:
                    await asyncio.sleep(0)
                for one in flood[1::2]:
                    one.sendall(data[100:])
                num_before = sum(steps)
                assert (await ask(address)).startswith(b"HTTP/1.1 200")
                assert sum(steps) - num_before <= NUM_FLOOD + NUM_FLOOD // 2 + 10
            while len(connections):
                await asyncio.sleep(0)
            assert not connections.handshake_turns._known and not connections.turns._known
        assert sum(steps) >= NUM_FLOOD and max(steps) <= 2 * NUM_HANDSHAKES, max(steps)

    in_loop(make_loop, test)


@LOOPS
def test_another_address_does_not_wait_for_the_flood(make_loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    begin = Arrivals.begin

    def noted(self: Arrivals, arrival: Any) -> None:
        order.append(arrival.address)
        begin(self, arrival)

    monkeypatch.setattr(Arrivals, "begin", noted)

    async def test() -> None:
        async with serving(answer) as address:
            with ExitStack() as stack:
                for host in (*["127.0.0.1"] * NUM_FLOOD, "127.0.0.2"):
                    one = stack.enter_context(socket.create_connection(address, source_address=(host, 0)))
                    one.sendall(GET)
                while len(order) <= NUM_FLOOD:
                    await asyncio.sleep(0)

    in_loop(make_loop, test)
    assert order.index("127.0.0.2") <= 2 * NUM_READS


@LOOPS
@pytest.mark.parametrize("tls", [None, TLS], ids=["plain", "tls"])
def test_connections_that_send_nothing_or_no_handshake_end(
    make_loop: Any, tls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silent ones, half handshakes and other bytes end in time, and earlier if others come."""
    for name in ("pipeline.http_server.listener.HEAD_S",):
        monkeypatch.setattr(name, 0.3)

    async def test() -> None:
        connections = HttpConnections(8)
        async with serving(answer, connections, tls=tls) as address:
            with ExitStack() as stack:
                first = b"" if tls is None else hello()[:50]
                many = [stack.enter_context(socket.create_connection(address)) for _ in range(9)]
                for one, data in zip(many, [b"", first, b"\x16\x03\x01", *[b""] * 6], strict=True):
                    one.setblocking(False)
                    one.sendall(data)
                begun_s = time.monotonic()
                while len(connections) != 8:
                    await asyncio.sleep(0)
                while len(connections):
                    await asyncio.sleep(0.01)
                assert time.monotonic() - begun_s >= 0.2
                for one in many:
                    assert (await asyncio.get_running_loop().sock_recv(one, 1000))[:5] in (
                        b"",
                        b"\x15\x03\x01\x00\x02",
                        b"HTTP/",
                    )
            assert not connections.turns._known and not connections.handshake_turns._known

    in_loop(make_loop, test)


@LOOPS
def test_a_listener_that_ends_ends_what_has_not_begun(make_loop: Any) -> None:
    async def test() -> None:
        with ExitStack() as stack:
            connections = HttpConnections()
            async with serving(answer, connections, tls=TLS) as address:
                many = [stack.enter_context(socket.create_connection(address, timeout=PATIENCE_S)) for _ in range(6)]
                for one in many[:3]:
                    one.sendall(hello()[:60])
                while len(connections) < 6:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.05)
            await asyncio.sleep(0)
            for one in many:
                with suppress(ConnectionResetError):
                    assert one.recv(1000) == b""
            assert not len(connections)

    in_loop(make_loop, test)


@LOOPS
def test_without_descriptors_new_connections_are_closed_and_the_loop_does_not_spin(
    make_loop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        """A listening socket while the process has no descriptor left, but for the one that is kept for this."""

        def __init__(self, real: socket.socket) -> None:
            self._real = real
            self.num_tries = 0

        def accept(self) -> Any:
            self.num_tries += 1
            if arrivals.os.close is not close:  # type: ignore[attr-defined]
                raise AssertionError
            if not closed:
                raise OSError(errno.EMFILE, "too many open files")
            return self._real.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

    closed: list[int] = []
    real_close = arrivals.os.close  # type: ignore[attr-defined]

    def close(descriptor: int) -> None:
        closed.append(descriptor)
        real_close(descriptor)

    async def test() -> None:
        monkeypatch.setattr(arrivals.os, "close", close)  # type: ignore[attr-defined]
        full = Full(socket.create_server(("127.0.0.1", 0)))
        listening: Any = full
        accepting = Arrivals(listening, lambda: pytest.fail(), HttpConnections(), tls=None, timeout_s=1.0)
        with socket.create_connection(full.getsockname(), timeout=PATIENCE_S) as one:
            one.setblocking(False)
            assert await asyncio.get_running_loop().sock_recv(one, 1) == b""
        assert len(closed) == 1 and full.num_tries <= 3
        await accepting.end()
        assert len(closed) == 2

    in_loop(make_loop, test)


async def test_a_spare_descriptor_that_others_have_taken_is_closed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may be that of something else by then."""
    listening = socket.create_server(("127.0.0.1", 0))
    accepting = Arrivals(listening, lambda: pytest.fail(), HttpConnections(), tls=None, timeout_s=1.0)
    spare, closed = accepting._spare, list[int]()
    open_, close = os.open, os.close

    def fail(*_: Any) -> int:
        raise OSError(errno.ENFILE, "too many open files in the system")

    monkeypatch.setattr(os, "close", lambda descriptor: closed.append(descriptor) or close(descriptor))
    monkeypatch.setattr(os, "open", fail)
    accepting._shed()
    accepting._shed()
    assert closed == [spare]
    monkeypatch.setattr(os, "open", open_)
    accepting._shed()
    await accepting.end()
    assert len(closed) == 2 and not spare_is_open(closed[1])


def spare_is_open(descriptor: int) -> bool:
    with suppress(OSError):
        return bool(os.fstat(descriptor))
    return False
