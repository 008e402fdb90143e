"""Nothing that a client sends stops or slows the server for others: while many hostile requests come at once, somebody
else goes on getting health and completions soon, and afterwards nothing is left of them."""

import contextlib
import http.client
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from tests.e2e.http import hostile
from tests.e2e.server import Server

MODEL = "SmolLM2-135M-Instruct"
NUM_AT_ONCE = 6
"""Of each kind; of the dearest, MANY."""
MANY = 50
DEAREST = ("140,000 messages", "a schema 5,000 levels deep")
SOON_S = 2.0
"""What somebody else waits at most. Alone on this test's machine it is a fifth of it."""
DEADLINE_S = 120.0
REFUSED = {400, 413, 422}
"""What a bad request is answered with, once the server has looked at it."""

BODIES = hostile.bodies(MODEL)
RAW = hostile.raw(MODEL)


class SomebodyElse:
    """A client that asks for health and for one token, in turns, and sees how long that takes."""

    def __init__(self, server: Server) -> None:
        address = urlsplit(server.url)
        self._address = address.hostname or "", address.port
        self.waits: list[tuple[float, str, int]] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.error: BaseException | None = None

    def _run(self) -> None:
        body = json.dumps({"model": MODEL, "prompt": "Hello", "max_tokens": 1}).encode()
        try:
            while not self.waits or not self._is_over.wait(0.01):
                for method, path, data in (("GET", "/health", None), ("POST", "/v1/completions", body)):
                    begin_s = time.monotonic()
                    connection = http.client.HTTPConnection(*self._address, timeout=DEADLINE_S)
                    connection.request(method, path, data)
                    response = connection.getresponse()
                    response.read()
                    connection.close()
                    self.waits.append((time.monotonic() - begin_s, path, response.status))
        except BaseException as error:  # noqa: BLE001 - raised again in the test's thread
            self.error = error

    def __enter__(self) -> "SomebodyElse":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(DEADLINE_S)
        if self.error is not None:
            raise self.error

    def was_served_soon(self) -> None:
        assert {status for _, _, status in self.waits} == {200}
        longest = max(self.waits)
        assert longest[0] < SOON_S, longest


def say(server: Server, data: bytes) -> bytes:
    """Send all of it, however the server takes it; everything that comes back."""
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=DEADLINE_S) as connection:

        def send() -> None:
            with contextlib.suppress(OSError):  # it has heard enough
                connection.sendall(data)

        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        reply = bytearray()
        try:
            while part := connection.recv(65536):
                reply += part
        except ConnectionResetError:
            pass
        sender.join(DEADLINE_S)
        return bytes(reply)


def at_once(server: Server, data: bytes, num: int = NUM_AT_ONCE) -> list[bytes]:
    with SomebodyElse(server) as somebody_else, ThreadPoolExecutor(num) as threads:
        replies = list(threads.map(lambda _: say(server, data), range(num)))
    somebody_else.was_served_soon()
    return replies


@pytest.fixture(autouse=True)
def unharmed(server: Server) -> object:
    """No process has been started again, and nothing is open or held."""
    before = {stage["name"]: stage["pid"] for stage in server.health()["stages"]}
    yield
    health = server.until_idle()
    assert {stage["name"]: stage["pid"] for stage in health["stages"]} == before
    assert health["status"] == "ok"


def error_of(reply: bytes) -> dict[str, object]:
    head, _, body = reply.partition(b"\r\n\r\n")
    assert b"application/json" in head
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"} and len(error["message"]) < 500
    return dict(error)


@pytest.mark.parametrize("name", BODIES)
def test_bodies(server: Server, name: str) -> None:
    path, make = BODIES[name]
    data = hostile.request(path, make())
    replies = at_once(server, data, MANY if name in DEAREST else NUM_AT_ONCE)
    # 503: of large bodies, sixteen may be on their way; and a busy machine may have no time left to check a grammar.
    # Then the request is refused for what it is when it comes alone.
    end_s = time.monotonic() + DEADLINE_S
    while (found := {next(hostile.statuses(reply), 0) for reply in replies}) == {503} and time.monotonic() < end_s:
        replies.append(say(server, data))
    assert found <= {*REFUSED, 503} and found & REFUSED, found
    for reply in replies:
        error_of(reply)


@pytest.mark.parametrize("name", RAW)
def test_connections(server: Server, name: str) -> None:
    replies = at_once(server, RAW[name]())
    for reply in replies:
        found = set(hostile.statuses(reply))
        assert found <= {400, 404, 413, 415, 431, 503}, found
    assert any(replies)


def test_slow_heads_hold_up_nobody(server: Server) -> None:
    """Two hundred connections that never finish their first line; that they end is seen in tests of the gateway."""
    address = urlsplit(server.url)
    connections = [
        socket.create_connection((address.hostname or "", address.port or 0), timeout=DEADLINE_S) for _ in range(200)
    ]
    try:
        with SomebodyElse(server) as somebody_else:
            for connection in connections:
                for byte in b"GET /ver":
                    connection.send(bytes([byte]))
        somebody_else.was_served_soon()
    finally:
        for connection in connections:
            connection.close()
