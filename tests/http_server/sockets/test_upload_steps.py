"""How much of a body is read at once, and whose turn it is."""

import asyncio
import os

import pytest
from aiohttp import web

from pipeline.http_server.listener import BODY_STEP_BYTES, LARGE_BODY_BYTES, HttpConnection
from pipeline.http_server.sockets.read_steps import STEP_BYTES
from tests.http_server.sockets.test_kept_connections import HOST, answer, serving

BODY_BYTES = 1024**2
HEAD = b"POST / HTTP/1.1\r\n" + HOST


async def length(request: web.Request) -> web.Response:
    return web.Response(text=str(len(await request.read())))


async def send(address: tuple[str, int], data: bytes, num: int) -> list[bytes]:
    """The bodies of the replies to `num` requests."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(data)
    bodies = [(await answer(reader))[1] for _ in range(num)]
    writer.close()
    return bodies


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What each read of a connection may return at most."""
    sizes: list[int] = []
    read = os.read

    def counted(descriptor: int, num: int) -> bytes:
        sizes.append(num)
        return read(descriptor, num)

    monkeypatch.setattr("pipeline.http_server.listener.os.read", counted)
    return sizes


async def test_a_body_of_known_length_is_read_in_large_steps(asked: list[int]) -> None:
    """But none is larger than the rest of the body: what follows may be dear."""
    one = HEAD + b"Content-Length: %d\r\n\r\n" % BODY_BYTES + bytes(BODY_BYTES)
    async with serving(length, client_max_size=2 * BODY_BYTES) as address:
        assert await send(address, one + one, 2) == [b"%d" % BODY_BYTES] * 2
    assert asked[0] == STEP_BYTES and BODY_STEP_BYTES in asked and max(asked) == BODY_STEP_BYTES
    assert asked.count(STEP_BYTES) <= 8, "the heads, and the ends of the bodies"


async def test_chunks_are_read_in_small_steps(asked: list[int]) -> None:
    """They may be tiny, and each is parsed."""
    chunks = (b"2000\r\n" + bytes(0x2000) + b"\r\n") * (BODY_BYTES // 0x2000) + b"0\r\n\r\n"
    async with serving(length, client_max_size=2 * BODY_BYTES) as address:
        assert await send(address, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks, 1) == [b"%d" % BODY_BYTES]
    assert set(asked) == {STEP_BYTES}


async def test_a_large_body_waits_as_one_that_sends_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has another class of turns than the connections of its address that have just begun."""
    costs: list[int] = []
    wait_turn = HttpConnection.wait_turn

    def noted(self: HttpConnection) -> None:
        wait_turn(self)
        costs.append(self.num_read)

    monkeypatch.setattr(HttpConnection, "wait_turn", noted)
    one = HEAD + b"Content-Length: %d\r\n\r\n" % BODY_BYTES + bytes(BODY_BYTES)
    async with serving(length, client_max_size=2 * BODY_BYTES) as address:
        await send(address, one, 1)
    assert costs[0] <= STEP_BYTES and LARGE_BODY_BYTES in costs
    assert max(costs) == LARGE_BODY_BYTES
