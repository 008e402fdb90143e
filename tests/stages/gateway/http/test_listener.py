"""Malformed requests get errors in OpenAI's format too."""

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.stages.gateway.admin.handlers import ServerApi
from tests.stages.gateway.gate import Gate

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"

CASES: dict[str, tuple[bytes, int, str]] = {
    "a header over 8 kB": (b"GET /version HTTP/1.1\r\nX-A: " + b"a" * 9000 + b"\r\n\r\n", 431, "too long"),
    "an address over 8 kB": (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n", 431, "too long"),
    "300 headers": (b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: 1\r\n" % i for i in range(300)) + b"\r\n", 431, "headers"),
    "a header without a colon": (b"GET /version HTTP/1.1\r\nbad header\r\n\r\n", 400, "header"),
    "a chunk without a length": (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n0\r\n\r\n", 400, "chunk"),
    "a length and chunks": (HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, "Length"),
    "a negative length": (HEAD + b"Content-Length: -3\r\n\r\nabc", 400, "Content-Length"),
    "an invented method": (b"G@T / HTTP/1.1\r\nHost: localhost\r\n\r\n", 400, "method"),
    "an invented version": (b"GET / HTTP/9.1\r\n\r\n", 400, ""),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\r\n\r\n", 400, ""),
    "bytes beyond ASCII in the path": (b"GET /\xff\xfe HTTP/1.1\r\n\r\n", 400, "path"),
}


def answer(gate: Gate, data: bytes) -> tuple[int, dict[str, str], Any]:
    """Status, headers and body of the response, which must end the connection."""
    with socket.create_connection(gate.address, timeout=30) as connection:
        connection.sendall(data)
        reply = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = reply.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(status.split()[1]), headers, json.loads(body)


@pytest.mark.parametrize("case", CASES)
def test_malformed_requests_get_an_error_and_are_not_logged(
    gate: Gate, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    data, status, word = CASES[case]
    got, headers, body = answer(gate, data)
    assert got == status
    assert headers["content-type"].startswith("application/json")
    error = body["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", None)
    assert error["code"] in ("invalid_http", "too_large")
    assert word in error["message"] and len(error["message"]) < 300 and "\n" not in error["message"]
    assert gate.client.get("/version").status_code == 200
    assert not [record for record in caplog.records if record.exc_info and record.levelname != "DEBUG"]


@pytest.mark.parametrize("path", [b"/v1/completions", b"/tokenize"])
@pytest.mark.parametrize("begin", [b"", b"5\r\nhello\r\n"])
def test_a_truncated_body_is_answered_immediately_and_once(gate: Gate, path: bytes, begin: bytes) -> None:
    """It does not wait for the body timeout."""
    head = b"POST " + path + b" HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(gate.address, timeout=10) as connection:
        connection.sendall(head + begin)
        assert gate.client.get("/load").status_code == 200  # the headers have been read by now
        connection.sendall(b"zz\r\nhello\r\n0\r\n\r\n")
        reply = b"".join(iter(lambda: connection.recv(65536), b""))
    assert reply.count(b"HTTP/1.") == 1
    assert reply.startswith(b"HTTP/1.1 400 ")
    error = json.loads(reply.partition(b"\r\n\r\n")[2])["error"]
    assert "cannot read the body" in error["message"]


def test_a_body_that_ends_wrong_before_a_route_reads_it_is_answered_immediately(gate: Gate) -> None:
    """Its parts arrive at once, the wrong one before the route's task has begun."""
    begin = HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n[\r\n0\r\nX-A: "
    with socket.create_connection(gate.address, timeout=10) as connection:
        connection.sendall(begin + b"a" * 1024**2)
        reply = connection.recv(65536)
    assert reply.startswith(b"HTTP/1.1 400 ") and b"cannot read the body" in reply


def test_an_uncaught_exception_is_a_500_error_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(self: ServerApi, request: Any) -> Any:
        raise ZeroDivisionError("a secret of the server")

    monkeypatch.setattr(ServerApi, "version", broken)
    with Gate(tmp_path) as gate:
        for accept in ("*/*", "text/html"):
            result = gate.client.get("/version", headers={"Accept": accept})
            assert (result.status_code, result.headers["Content-Type"]) == (500, "application/json; charset=utf-8")
            assert result.json()["error"]["type"] == "server_error"
            assert "secret" not in result.text
        assert gate.client.get("/load").status_code == 200
    assert "a secret of the server" in caplog.text


def test_many_simultaneous_connections_are_served_at_once(gate: Gate) -> None:
    connections = [socket.create_connection(gate.address, timeout=30) for _ in range(400)]
    try:
        for connection in connections:
            connection.sendall(b"GET /load HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert all(b'{"server_load":0,' in connection.recv(4096) for connection in connections)
    finally:
        for connection in connections:
            connection.close()


def test_a_body_of_tiny_chunks_does_not_block_the_loop(gate: Gate) -> None:
    """60,000 chunks of one byte, 360 kB, would take nine seconds if they were buffered at once."""
    begin_s = time.monotonic()
    with socket.create_connection(gate.address, timeout=30) as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n[\r\n" * 60_000 + b"0\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 400 ")
    assert time.monotonic() - begin_s < 5


def test_a_body_with_too_many_buffered_chunks_is_refused_early(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.http_server.listener.MAX_CHUNKS", 100)
    with socket.create_connection(gate.address, timeout=30) as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n[\r\n" * 1000)
        reply = connection.recv(65536)
    assert reply.startswith(b"HTTP/1.1 400 ") and b"chunks are too small" in reply


@pytest.mark.parametrize("begin", [b"", b"G", b"GET /version HTTP/1.1\r\nHost: localhost\r\nX-A: "])
def test_incomplete_headers_end_the_connection(tmp_path: Path, begin: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.http_server.listener.HEAD_S", 0.2)
    with Gate(tmp_path) as gate, socket.create_connection(gate.address, timeout=10) as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n" if begin else b"")
        if begin:
            assert b"200 OK" in connection.recv(65536)
            connection.sendall(begin)
        assert connection.recv(65536) == b""
