"""A response reaches its client also if the connection ends with it."""

import asyncio
import gzip
import ssl
import time

import pytest
from aiohttp import web

from pipeline.http_server import ends
from tests.http_server.sockets.test_kept_connections import HOST, serving
from tests.rig import PATIENCE_S
from tests.runtime.security.test_tls import CERT, KEY

BOMB = gzip.compress(bytes(64 * 1024**2), 9)
"""aiohttp stops reading when the first part of it is decompressed."""
REPLY = b"x" * 4 * 1024**2
HEAD = b"POST / HTTP/1.1\r\n" + HOST + b"Content-Encoding: gzip\r\nContent-Type: application/json\r\n"


def context() -> ssl.SSLContext:
    found = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    found.load_cert_chain(CERT, KEY)
    return found


async def sent(address: tuple[str, int], tls: bool, parts: list[bytes]) -> bytes:
    """All that the server answers to `parts`. The last one is sent when the answer has begun."""
    client = ssl._create_unverified_context() if tls else None
    reader, writer = await asyncio.open_connection(*address, ssl=client)
    try:
        async with asyncio.timeout(PATIENCE_S):
            for part in parts[:-1]:
                writer.write(part)
            begun = await reader.readexactly(1)
            writer.write(parts[-1])
            return begun + await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("framing", [b"Content-Length: %d\r\n\r\n" % len(BOMB), b"Transfer-Encoding: chunked\r\n\r\n"])
async def test_a_reply_is_whole_behind_a_compressed_body_that_no_route_has_read(
    tls: bool, framing: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel resets a connection that ends before all has been read, and drops what the client has not read yet."""
    if not tls:
        monkeypatch.setattr(ends, "QUIET_S", 2 * PATIENCE_S)  # the reply ends before the connection

    async def handle(_: web.Request) -> web.StreamResponse:
        return web.Response(body=REPLY)

    is_chunked = framing.startswith(b"T")
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BOMB), BOMB) if is_chunked else BOMB
    begin = time.monotonic()
    async with serving(handle, tls=context() if tls else None) as address:
        answer = await sent(address, tls, [HEAD, framing, body[:-1000], body[-1000:]])
    assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"\r\n\r\n" + REPLY)
    assert time.monotonic() - begin < ends.DROP_S


async def test_nothing_of_such_a_body_is_decompressed_or_kept_and_it_does_not_hold_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ends, "DROP_S", 1.0)
    monkeypatch.setattr(ends, "QUIET_S", 0.1)
    seen: list[web.Request] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        seen.append(request)
        return web.Response(body=b"done")

    async with serving(handle) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(HEAD + b"Content-Length: 1000000000\r\n\r\n" + BOMB)
        async with asyncio.timeout(PATIENCE_S):
            await reader.readuntil(b"done")
            held = seen[0].content.total_bytes
            with pytest.raises(ConnectionError):
                while True:  # it ends after DROP_S, whatever still comes
                    writer.write(BOMB)
                    await writer.drain()
                    await asyncio.sleep(0.02)
        assert seen[0].content.total_bytes == held
        writer.close()
