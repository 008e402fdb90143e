"""No client can stop or slow the server for others: during many concurrent hostile requests, another client gets health
and completions quickly. Afterwards nothing of the requests remains."""

import contextlib
import http.client
import json
import socket
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from tests.e2e.http import hostile
from tests.e2e.server import Server
from tests.slices import ALL_CASES
from tests.stages.gateway.peers import free_port
from tools.serving_bench import fairness as fairness_bench

MODEL = "SmolLM2-135M-Instruct"
NUM_AT_ONCE = 6
"""Requests of each kind; MANY of the most expensive."""
MANY = 50
MOST_EXPENSIVE = ("140,000 messages", "a schema 5,000 levels deep")
SOON_S = 2.0
"""The longest that the other client may wait. On an idle test machine it waits a fifth of it."""
FLOODS = ("prompts", "uploads", *(("chats", "grammars") if ALL_CASES else ()))
"""tests/stages/ingest has the turns of templates and grammars, too."""
NUM_ROUNDS = 3
ADDED_S = 1.0
"""How much longer a request may take while another key floods the server, on a busy machine: tens of milliseconds if
it is quiet."""
DEADLINE_S = 120.0
REJECTED = {400, 413, 422}
"""The statuses of a bad request that the server has read."""

BODIES = hostile.bodies(MODEL)
RAW = hostile.raw(MODEL)


class OtherClient:
    """A client that requests health and one token in turns, and measures the latency."""

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

    def __enter__(self) -> "OtherClient":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(DEADLINE_S)
        if self.error is not None:
            raise self.error

    def assert_served_soon(self) -> None:
        assert {status for _, _, status in self.waits} == {200}
        longest = max(self.waits)
        assert longest[0] < SOON_S, longest


def send_all(server: Server, data: bytes) -> bytes:
    """Send all of it, at whatever rate the server reads; returns all received bytes."""
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=DEADLINE_S) as connection:

        def send() -> None:
            with contextlib.suppress(OSError):  # the server closed the connection
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
    with OtherClient(server) as other_client, ThreadPoolExecutor(num) as threads:
        replies = list(threads.map(lambda _: send_all(server, data), range(num)))
    other_client.assert_served_soon()
    return replies


@pytest.fixture(autouse=True)
def unharmed(server: Server) -> object:
    """No process has been restarted, and no request is open and no memory held."""
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
def test_hostile_bodies_are_rejected_and_harm_no_other_client(server: Server, name: str) -> None:
    path, make = BODIES[name]
    data = hostile.request(path, make())
    replies = at_once(server, data, MANY if name in MOST_EXPENSIVE else NUM_AT_ONCE)
    # 503: sixteen large bodies may be in flight, and a busy machine may have no time left to check a grammar. Alone,
    # the request then gets its own error.
    end_s = time.monotonic() + DEADLINE_S
    while (found := {next(hostile.statuses(reply), 0) for reply in replies}) == {503} and time.monotonic() < end_s:
        replies.append(send_all(server, data))
    assert found <= {*REJECTED, 503} and found & REJECTED, found
    for reply in replies:
        error_of(reply)


@pytest.mark.parametrize("name", RAW)
def test_hostile_connections_harm_no_other_client(server: Server, name: str) -> None:
    replies = at_once(server, RAW[name]())
    for reply in replies:
        found = set(hostile.statuses(reply))
        assert found <= {400, 404, 413, 415, 431, 503}, found
    assert any(replies)


def test_slow_request_lines_delay_no_other_client(server: Server) -> None:
    """Two hundred connections never finish their first line; tests of the gateway check that they are closed."""
    address = urlsplit(server.url)
    connections = [
        socket.create_connection((address.hostname or "", address.port or 0), timeout=DEADLINE_S) for _ in range(200)
    ]
    try:
        with OtherClient(server) as other_client:
            for connection in connections:
                for byte in b"GET /ver":
                    connection.send(bytes([byte]))
        other_client.assert_served_soon()
    finally:
        for connection in connections:
            connection.close()


@pytest.mark.usefixtures("smollm2_dir")
def test_a_key_that_floods_does_not_delay_another_key() -> None:
    """Long prompts, chats with a slow template, grammars and uploads of one key: each request of the other key takes
    little longer than alone. Without fair queues, some of them wait for seconds. `python -m
    tools.serving_bench.fairness` measures how much longer on a quiet machine, also with a flood of frames."""
    zmq = f"tcp://127.0.0.1:{free_port()}"
    keys = {"PIPELINE_API_KEYS": ",".join(fairness_bench.KEYS)}
    with Server(f"gateway.zmq={zmq}", environ=keys) as server:
        address = fairness_bench.Address(server.url, zmq)
        fairness_bench.waits_of(address, 1)  # the grammar checker starts with the first grammar
        alone = fairness_bench.waits_of(address, NUM_ROUNDS)
        for name in FLOODS:
            with fairness_bench.flooded(name, address):
                flooded = fairness_bench.waits_of(address, NUM_ROUNDS)
            for probe, waits in flooded.items():
                added_s = statistics.median(waits) - statistics.median(alone[probe])
                assert added_s < ADDED_S, (name, probe, added_s)
        server.until_idle()
