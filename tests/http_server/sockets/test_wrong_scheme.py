"""HTTP to a port with TLS, and TLS to a port without: the client or the log says what is wrong."""

import asyncio
import json
import logging
import socket
from typing import Any

import pytest

from pipeline.http_server.sockets.wrong_scheme import LINE_EVERY_S, WrongScheme
from tests.http_server.sockets.test_arrivals import GET, LOOPS, TLS, answer, ask, hello, in_loop
from tests.http_server.sockets.test_kept_connections import serving


async def sent(address: tuple[str, int], data: bytes) -> bytes:
    """What comes back over a plain connection."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(data)
    reply = await reader.read()
    writer.close()
    return reply


@LOOPS
def test_http_to_a_port_with_tls_is_answered_in_words(make_loop: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with serving(answer, tls=TLS) as address:
            for method in (b"GET", b"POST"):
                head, _, body = (await sent(address, GET.replace(b"GET", method))).partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 400 ")
                assert "begins with https://" in json.loads(body)["error"]["message"]
            assert (await ask(address)).startswith(b"HTTP/1.1 200 ")

    in_loop(make_loop, test)
    assert [record.getMessage() for record in caplog.records if "needs https://" in record.getMessage()] == [
        "a client spoke HTTP to this port, which speaks HTTPS: it needs https:// in its address"
    ]


@LOOPS
def test_tls_to_a_port_without_is_logged(make_loop: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with serving(answer) as address:
            await sent(address, hello() + b"\n")
            assert (await sent(address, GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))).startswith(
                b"HTTP/1.1 200 "
            )

    in_loop(make_loop, test)
    assert [record.getMessage() for record in caplog.records if "spoke HTTPS" in record.getMessage()] == [
        "a client spoke HTTPS to this port, which speaks HTTP: it needs http:// in its address, or the server a "
        "certificate (gateway.ssl_certfile)"
    ]


def test_a_flood_of_such_clients_has_one_line_in_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr("pipeline.http_server.sockets.wrong_scheme.time.monotonic", lambda: now_s)
    scheme = WrongScheme(has_tls=True)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        assert not scheme.is_refused(ours)  # nothing has arrived
        for _ in range(50):
            pair = socket.socketpair()
            with pair[0], pair[1]:
                pair[1].sendall(GET)
                assert scheme.is_refused(pair[0])
        now_s += LINE_EVERY_S
        theirs.sendall(GET)
        assert scheme.is_refused(ours)
    assert caplog.record_tuples and all(level == logging.WARNING for _, level, _ in caplog.record_tuples)
    assert [record.fields["connections"] for record in caplog.records] == [1, 50]  # type: ignore[attr-defined]
