"""Replies that clients don't read: each has a deadline, all are counted and bounded, and a pipeline waits."""

import json
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.http_server.sockets import slow_clients
from pipeline.stages.gateway.admin.handlers import ServerApi
from tests.rig import PATIENCE_S
from tests.runtime.security.test_tls import CA
from tests.stages.gateway.admission.test_preemption import until
from tests.stages.gateway.apis.responses.bodies import PATH
from tests.stages.gateway.gate import CHAT, END, MODEL, Gate, read_until
from tests.stages.gateway.http.access.test_guard import KEY, SECOND, locked
from tests.stages.gateway.http.access.test_tls import FILES, client_of

BUFFER_BYTES = 4096
"""Of the kernel, at both ends."""
TIMEOUT_S = 0.2
LONG_S = 1000.0


def connection_to(address: tuple[str, int]) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    connection.settimeout(PATIENCE_S)
    connection.connect(address)
    return connection


def get(address: tuple[str, int], path: str, key: str = "", num: int = 1) -> socket.socket:
    """A connection that has sent a request, `num` times, and reads nothing."""
    connection = connection_to(address)
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{authorization}\r\n".encode() * num)
    return connection


def stored(gate: Gate, **fields: Any) -> str:
    """The path of a stored response with a large item."""
    body = {"model": MODEL, "input": "i" * 300_000, "instructions": "a" * 300_000} | fields
    future = gate.post(body, PATH)
    gate.serve()
    response = future.result()
    assert response.status_code == 200, response.text
    text = response.text
    response_id = (
        json.loads(text.split("data: ")[1].split("\n\n")[0])["response"]["id"]
        if "stream" in fields
        else json.loads(text)["id"]
    )
    return f"{PATH}/{response_id}"


def until_unread(gate: Gate, num_bytes: int = 0, headers: dict[str, str] | None = None) -> None:
    """Wait until clients have not taken more than this."""
    end = time.monotonic() + PATIENCE_S
    while (found := gate.client.get("/load", headers=headers).json())["open_bytes"] <= num_bytes:
        assert time.monotonic() < end, found


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    with Gate(tmp_path, send_buffer_bytes=BUFFER_BYTES, slow_client_timeout_s=TIMEOUT_S) as gate:
        yield gate


LARGE: dict[str, Callable[[Gate], str]] = {
    "/openapi.json": lambda _: "/openapi.json",
    "/docs": lambda _: "/docs",
    "a stored response": stored,
    "its items": lambda gate: f"{stored(gate)}/input_items",
    "its events": lambda gate: f"{stored(gate, background=True, stream=True)}?stream=true",
}


@pytest.mark.parametrize("name", LARGE)
def test_a_client_that_does_not_read_a_reply_is_disconnected(gate: Gate, name: str) -> None:
    path = LARGE[name](gate)
    size = len(gate.client.get(path).content)
    assert size > 4 * BUFFER_BYTES, "the kernel has all of it, so the test proves nothing"
    until(gate, lambda found: found["open_bytes"] == 0)
    with get(gate.address, path) as connection:
        until_unread(gate, size // 5)  # events are sent one by one
        until(gate, lambda found: found["open_bytes"] == 0)
        assert len(read_all(connection)) < size


def read_all(connection: socket.socket) -> bytes:
    data = b""
    try:
        while more := connection.recv(1 << 20):
            data += more
    except (ConnectionError, ssl.SSLError):
        pass
    return data


def test_a_client_that_reads_slowly_gets_everything(gate: Gate) -> None:
    size = len(gate.client.get("/openapi.json").content)
    with get(gate.address, "/openapi.json") as connection:
        body = read_until(connection, b"\r\n\r\n").partition(b"\r\n\r\n")[2]
        while len(body) < size:
            body += connection.recv(20_000)
        json.loads(body)


@pytest.mark.parametrize(("handler", "path"), [("version", "/version"), ("openapi", "/openapi.json")])
def test_a_pipeline_has_one_reply_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handler: str, path: str
) -> None:
    """A client that only sends would collect replies without end."""
    num_calls, num = 0, 3000
    whole = getattr(ServerApi, handler)

    async def counted(self: ServerApi, request: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return await whole(self, request)

    monkeypatch.setattr(ServerApi, handler, counted)
    with Gate(tmp_path, send_buffer_bytes=BUFFER_BYTES, slow_client_timeout_s=LONG_S) as gate:
        with get(gate.address, path, num=num) as connection:
            num_before, end = -1, time.monotonic() + PATIENCE_S
            while num_before != num_calls:  # the kernel takes the first ones
                assert time.monotonic() < end
                num_before = num_calls
                for _ in range(20):
                    assert gate.client.get("/live").status_code == 200
            assert 0 < num_calls < num // 4
            until_unread(gate)
            assert read_until(connection, b"HTTP/1.1 200")
        until(gate, lambda found: found["open_bytes"] == 0)


def test_the_key_that_reads_the_least_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All replies together are bounded; a key's own are dropped, and others get theirs however slowly they read."""
    monkeypatch.setattr(slow_clients, "MIN_UNREAD_BYTES", 2 * 1024**2)
    settings: dict[str, Any] = {"max_open_bytes": 2**20, "slow_client_timeout_s": LONG_S}
    with locked(tmp_path, send_buffer_bytes=BUFFER_BYTES, **settings) as gate:
        authorized = {"Authorization": f"Bearer {KEY}"}
        size = len(gate.client.get("/openapi.json", headers=authorized).content)
        other = get(gate.address, "/openapi.json", SECOND)
        until_unread(gate, headers=authorized)
        held, most = [], 0
        for _ in range(4 * 2 * 1024**2 // size):
            held.append(get(gate.address, "/openapi.json", KEY))
            read_until(held[-1], b"HTTP/1.1 200")
            found = gate.client.get("/load", headers=authorized).json()["open_bytes"]
            assert found <= 2 * 1024**2 + size
            most = max(most, found)
        assert most > 2**20, "there was room for all, so the test proves nothing"
        assert len(read_all(held[0])) < size
        data = read_until(other, b'"openapi"')
        while len(data) < size:
            data += other.recv(1 << 20)
        read_until(held[-1], b"}")
        for connection in (other, *held):
            connection.close()


def test_a_reply_alone_is_sent_whatever_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_clients, "MIN_UNREAD_BYTES", 1024)
    with Gate(tmp_path, send_buffer_bytes=BUFFER_BYTES, max_open_bytes=2**20, slow_client_timeout_s=LONG_S) as gate:
        size = len(gate.client.get("/openapi.json").content)
        connection = get(gate.address, "/openapi.json")
        until_unread(gate)
        data = b""
        while len(data) < size:
            data += connection.recv(1 << 20)
        connection.close()


# --------------------------------------------------------------------------------------------------------------- TLS


def secure(gate: Gate, path: str, body: Any = None) -> ssl.SSLSocket:
    """A connection over TLS that has sent a request, and reads nothing."""
    context = ssl.create_default_context(cafile=CA)
    context.check_hostname = False
    connection = context.wrap_socket(connection_to(gate.address))
    content = b"" if body is None else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    connection.sendall(
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    )
    connection.sendall(content)
    return connection


@pytest.mark.parametrize("is_stream", [False, True])
def test_over_tls_a_request_ends_when_its_client_has_the_reply(tmp_path: Path, is_stream: bool) -> None:
    """Not only when the client sends something else: idle connections would keep the room of their requests."""
    body = CHAT | {"stream": is_stream}
    with (
        Gate(tmp_path, **FILES) as gate,
        client_of(gate) as client,
        secure(gate, "/v1/chat/completions", body) as connection,
    ):
        gate.serve("Hello")
        read_until(connection, END if is_stream else b"usage")
        end = time.monotonic() + PATIENCE_S
        while (found := client.get("/load").json())["open_sequences"]:
            assert time.monotonic() < end, found


@pytest.mark.parametrize("path", ["/openapi.json", "/docs"])
def test_over_tls_a_client_that_does_not_read_is_disconnected(tmp_path: Path, path: str) -> None:
    settings: dict[str, Any] = {"slow_client_timeout_s": TIMEOUT_S, "send_buffer_bytes": BUFFER_BYTES}
    with Gate(tmp_path, **settings, **FILES) as gate, client_of(gate) as client:
        whole = client.get(path).content
        with secure(gate, path) as connection:
            end = time.monotonic() + PATIENCE_S
            while not client.get("/load").json()["open_bytes"]:
                assert time.monotonic() < end
            while client.get("/load").json()["open_bytes"]:
                assert time.monotonic() < end
            assert len(read_all(connection)) < len(whole)


@pytest.mark.parametrize("is_stream", [False, True])
def test_over_tls_a_client_that_does_not_read_its_output_is_disconnected(tmp_path: Path, is_stream: bool) -> None:
    settings: dict[str, Any] = {"slow_client_timeout_s": TIMEOUT_S, "send_buffer_bytes": BUFFER_BYTES}
    text, body = "x" * 2_000_000, CHAT | {"stream": is_stream}
    with (
        Gate(tmp_path, **settings, **FILES) as gate,
        secure(gate, "/v1/chat/completions", body) as connection,
    ):
        gate.serve(text)
        gate.rig.until(lambda load: load.num_open_requests == 0)
        assert len(read_all(connection)) < len(text)


def test_over_tls_a_client_that_reads_gets_everything(tmp_path: Path) -> None:
    text = "é" * 1_000_000
    with Gate(tmp_path, send_buffer_bytes=BUFFER_BYTES, **FILES) as gate, client_of(gate) as client:
        for _ in range(2):  # on one connection
            reply = gate.do(client.post, "/v1/chat/completions", json=CHAT)
            gate.serve(text)
            assert reply.result().json()["choices"][0]["message"]["content"] == text
            assert client.get("/openapi.json").json()["openapi"]
            head = client.head("/openapi.json")
            assert int(head.headers["Content-Length"]) > 100_000 and not head.content
