"""Who loses connections if clients do not take their replies."""

import asyncio
import logging
import time
from typing import Any

import pytest
from aiohttp import web

from pipeline.http_server.sockets import slow_clients
from pipeline.http_server.sockets.deliveries import Deliveries
from pipeline.http_server.sockets.slow_clients import UnreadReplies
from tests.rig import PATIENCE_S

KIB = 1024
LOG = logging.getLogger("test")


class Connection:
    """A client's connection, and the request on it."""

    def __init__(self, address: str, num_buffered: int = 0) -> None:
        self.is_aborted = False
        self.num_buffered = self.output_size = num_buffered
        self.transport = self.writer = self
        self._address = address

    def get_extra_info(self, name: str) -> Any:
        return (self._address, 5000) if name == "peername" else None

    def get_write_buffer_size(self) -> int:
        return self.num_buffered

    def abort(self) -> None:
        self.is_aborted = True


class Replies:
    """Replies that clients do not take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, max_bytes: int) -> None:
        self.unread = UnreadReplies(lambda: max_bytes, 60, Deliveries(LOG))
        self._scope = ""
        monkeypatch.setattr(slow_clients, "current_scope", lambda: self._scope)
        self._held: list[Any] = []

    def send(self, address: str, num_bytes: int, scope: str = "", size: int = 0) -> Connection:
        """A reply of which so much is buffered, and of which `size` will be written."""
        self._scope = scope
        connection: Any = Connection(address, num_bytes)
        counted = self.unread.counted(connection, size)
        counted.__enter__()
        self._held.append(counted)
        return connection


def test_those_without_a_key_lose_theirs_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many addresses they have: else each of them would have less than any key."""

    async def run() -> None:
        replies = Replies(monkeypatch, 1000 * KIB)
        of_key = [replies.send("192.0.2.1", 250 * KIB, "key") for _ in range(3)]
        others = [replies.send(f"198.51.100.{i}", 10 * KIB) for i in range(60)]
        assert not any(one.is_aborted for one in of_key)
        assert sum(one.is_aborted for one in others) >= 35
        assert replies.unread.num_bytes <= 1000 * KIB

    asyncio.run(run())


def test_without_keys_the_address_that_has_most_loses_what_it_takes_the_least_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        replies = Replies(monkeypatch, 1000 * KIB)
        many = [replies.send("2001:db8::1", 200 * KIB), replies.send("2001:db8::2", 200 * KIB)]
        few = replies.send("192.0.2.1", 300 * KIB)
        many[0].num_buffered = 0  # it has taken it
        last = replies.send("192.0.2.9", 350 * KIB)
        assert [one.is_aborted for one in (*many, few, last)] == [False, True, False, False]

    asyncio.run(run())


def test_what_was_written_in_pieces_is_not_what_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large reply is given to the connection piece by piece, so little of it is buffered in any case."""

    async def run() -> None:
        replies = Replies(monkeypatch, 1000 * KIB)
        quick, slow = replies.send("192.0.2.1", 0, size=400 * KIB), replies.send("192.0.2.1", 0, size=400 * KIB)
        slow.output_size, slow.num_buffered = 80 * KIB, 80 * KIB
        quick.output_size, quick.num_buffered = 300 * KIB, 80 * KIB
        replies.send("192.0.2.9", 0, size=300 * KIB)
        assert [slow.is_aborted, quick.is_aborted] == [True, False]

    asyncio.run(run())


async def test_the_transport_gets_a_large_body_in_pieces() -> None:
    """It would copy all of it, twice, in the event loop: 0.2 s and more for 190 MiB."""
    body = b"x" * (8 * 1024 * KIB)
    buffered: list[int] = []

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        assert request.transport is not None
        response, transport = web.Response(body=body), request.transport
        write = transport.write

        def counted(data: Any) -> None:
            write(data)
            buffered.append(transport.get_write_buffer_size())

        transport.write = counted  # type: ignore[method-assign]
        return response

    unread = UnreadReplies(lambda: len(body), PATIENCE_S, Deliveries(LOG))
    runner = web.ServerRunner(web.Server(unread.wrap(answer)))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        reader, writer = await asyncio.open_connection(*runner.addresses[0][:2], limit=4 * KIB)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"Content-Length: %d\r\n" % len(body) in head
            assert await reader.readexactly(len(body)) == body
        writer.close()
    finally:
        await runner.cleanup()
    assert max(buffered) <= slow_clients.HIGH_BYTES + slow_clients.PIECE_BYTES


def test_making_room_takes_no_search_for_each_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be as many clients as connections. Four times as many took sixteen times as long."""

    async def cpu_s(num: int) -> float:
        replies = Replies(monkeypatch, num * KIB)
        for i in range(num):
            replies.send(f"10.{i >> 16}.{(i >> 8) & 255}.{i & 255}", KIB)
        began_s = time.process_time()
        replies.send("192.0.2.1", KIB)
        assert replies.unread.num_bytes <= num * KIB * 7 // 8 + KIB
        return time.process_time() - began_s

    small, large = (min(asyncio.run(cpu_s(num)) for _ in range(3)) for num in (2000, 8000))
    assert large < 9 * small
