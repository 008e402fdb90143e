"""Authentication over HTTP, at the admin listener, and over ZeroMQ."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.client import protocol as p
from pipeline.config.settings import Settings
from pipeline.http_server.access.guard import OPEN_PATHS
from pipeline.runtime import messages as m
from pipeline.runtime.security.api_keys import Keys
from pipeline.stages.gateway.page import files
from tests.stages.gateway.gate import CHAT, COMPLETION, Gate, idle_api
from tests.stages.gateway.peers import RawPeer
from tests.zmq_requests import generate

KEY = "sk-a-key-of-this-server"
SECOND = "another-key-0123456789"
RIGHT = {"Authorization": f"Bearer {KEY}"}


@contextmanager
def locked(folder: Path, keys: tuple[str, ...] = (KEY, SECOND), admin: bool = False, **gateway: Any) -> Iterator[Gate]:
    """A gateway with keys, if there are some, and, if requested, with an admin listener (`gate.admin`)."""
    gate = Gate(folder, **gateway)
    keys_fd = Keys.of(keys).share() if keys else -1
    more: dict[str, Any] = {"keys_fd": keys_fd}
    if admin:
        listener = socket.create_server(("127.0.0.1", 0))
        gate.admin = f"http://127.0.0.1:{listener.getsockname()[1]}"  # type: ignore[attr-defined]
        more["admin_fd"] = listener.detach()
    gate.rig.launch = msgspec.structs.replace(gate.rig.launch, **more)
    try:
        with gate:
            yield gate
    finally:
        if keys:
            os.close(keys_fd)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    with locked(tmp_path) as gate:
        yield gate


def assert_refused(response: Any, words: str) -> None:
    assert response.status_code == 401, response.text
    assert response.headers["WWW-Authenticate"] == "Bearer"
    assert response.headers["Content-Type"].startswith("application/json")
    if response.request.method != "HEAD":
        error = response.json()["error"]
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "invalid_api_key")
        assert words in error["message"]


ROUTES = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("GET", "/version"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/load"),
    ("POST", "/abort_requests"),
    ("POST", "/reset_prefix_cache"),
    ("GET", "/nothing/here"),
    ("POST", "/"),
    ("GET", "/page/"),
    ("GET", "/page/../pipeline"),
    ("GET", "/pipeline"),
    ("DELETE", "/v1/models"),
    ("OPTIONS", "/v1/chat/completions"),
    ("HEAD", "/v1/models"),
    ("POST", "/health"),
    ("DELETE", "/metrics"),
    ("OPTIONS", "/health"),
    ("GET", "/health/"),
    ("GET", "/%68ealth"),
    ("GET", "/health/../v1/models"),
    ("GET", "/metrics/x"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_requires_a_key(gate: Gate, method: str, path: str) -> None:
    body = b"{" if method == "POST" else None
    assert_refused(gate.client.request(method, path, content=body), "API key required")
    wrong = {"Authorization": f"Bearer {KEY}x", "X-Request-Id": "mine"}
    refused = gate.client.request(method, path, content=body, headers=wrong)
    assert_refused(refused, "Invalid API key")
    assert refused.headers["X-Request-Id"] == "mine"


@pytest.mark.parametrize("header", [KEY, f"Key {KEY}", "Bearer", f"Bearer {KEY} {KEY}"])
def test_a_key_in_another_form_gets_the_form(gate: Gate, header: str) -> None:
    refused = gate.client.get("/v1/models", headers={"Authorization": header})
    assert_refused(refused, "the header has another form; send 'Authorization: Bearer KEY' or 'x-api-key: KEY'")
    assert KEY not in refused.text


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/models", 200), ("POST", "/v1/completions", 400), ("GET", "/nothing", 404), ("PUT", "/version", 405)],
)
def test_a_valid_key_gives_the_usual_response(gate: Gate, method: str, path: str, status: int) -> None:
    body = b"{" if method == "POST" else None
    assert gate.client.request(method, path, content=body, headers=RIGHT).status_code == status


def test_every_registered_route_requires_a_key(gate: Gate) -> None:
    """Including routes that are added later."""
    api = idle_api(Settings().gateway)
    resources = api.app().router.resources()
    paths = {resource.canonical.replace("{model}", "x") for resource in resources} - set(OPEN_PATHS)
    paths -= set(files.paths())  # tests/stages/gateway/page has the tests of these
    assert len(paths) >= 10
    for path in paths:
        for method in ("GET", "POST", "PUT", "DELETE"):
            assert gate.client.request(method, path).status_code == 401, (method, path)


def test_health_requires_no_key(gate: Gate) -> None:
    for method in ("GET", "HEAD"):
        response = gate.do(gate.client.request, method, "/health?x=1")
        question = gate.rig.receive("supervisor", m.AskHealth)
        gate.rig.send(m.Health(question.nonce, "ok", [], None), "supervisor.0")
        assert response.result().status_code == 200


@pytest.mark.parametrize("key", [KEY, SECOND])
def test_each_key_is_accepted(gate: Gate, key: str) -> None:
    gate.client.headers["Authorization"] = f"bearer {key}"
    reply = gate.complete(COMPLETION)
    gate.delta(gate.begin(), "Hi", finish=m.Finish.LENGTH)
    assert reply.result().json()["choices"][0]["text"] == "Hi"


def raw(gate: Gate, head: str, body: bytes = b"") -> bytes:
    """Everything that is received until the server closes the connection."""
    with socket.create_connection(gate.address, timeout=30) as connection:
        connection.sendall(head.encode() + body)
        return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize("target", ["//", "//health", "//page/main.js", "/page//main.js", "/%70age/main.js"])
def test_open_paths_are_compared_exactly(gate: Gate, target: str) -> None:
    """httpx would send another target."""
    assert raw(gate, f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n").startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/abort_requests", "/nothing", "/health"])
def test_a_refused_client_gets_no_100_continue(gate: Gate, path: str) -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n"
    with socket.create_connection(gate.address, timeout=30) as connection:
        connection.sendall(head.encode())
        reply = connection.recv(65536)
        connection.sendall(b"and a body")
        reply += b"".join(iter(lambda: connection.recv(65536), b""))
    assert reply.startswith(b"HTTP/1.1 401 ") and b"100 Continue" not in reply and reply.count(b"HTTP/1.1") == 1


def test_the_response_does_not_wait_for_the_body(gate: Gate) -> None:
    """Whatever length and encoding the headers declare."""
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n"
    head += "Content-Encoding: x-none\r\n\r\n"
    with socket.create_connection(gate.address, timeout=5) as connection:
        connection.sendall(head.encode())
        assert connection.recv(65536).startswith(b"HTTP/1.1 401 ")


def test_a_pipelined_request_after_a_refusal_is_not_served(gate: Gate) -> None:
    first = "GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    second = f"GET /version HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n\r\n"
    reply = raw(gate, first + second)
    assert reply.count(b"HTTP/1.1") == 1 and b"Connection: close" in reply


def test_two_authorization_headers_are_refused(gate: Gate) -> None:
    head = f"GET /version HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nAuthorization: Bearer x\r\n\r\n"
    assert raw(gate, head).startswith(b"HTTP/1.1 401 ")


def test_keys_are_not_logged_or_repeated(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "pipeline")
    for shown in (KEY, f"{KEY}-wrong"):
        headers = {"Authorization": f"Bearer {shown}"}
        texts = [gate.client.post("/v1/completions", content=b"{", headers=headers).text]
        texts.append(gate.client.get(f"/nothing?api_key={shown}", headers=headers).text)
        broken = f"GET /version HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {shown}\r\nbad header\r\n\r\n"
        texts.append(raw(gate, broken).decode())
        assert not [text for text in texts if KEY in text]
    own = [record for record in caplog.records if record.name.startswith("pipeline")]
    assert own and not [record for record in own if KEY in str(vars(record))]


def test_recordings_contain_no_key(tmp_path: Path) -> None:
    recording = tmp_path / "gateway.rec"
    with locked(tmp_path, record=recording) as gate:
        reply = gate.do(gate.client.post, "/v1/chat/completions", json=CHAT, headers=RIGHT)
        gate.delta(gate.begin(), "Hi", finish=m.Finish.LENGTH)
        assert reply.result().status_code == 200
        with RawPeer(gate, hello=False) as peer:
            peer.send(p.Hello(2, 2, "a test", KEY))
            peer.receive(p.Welcome)
    data = recording.read_bytes()
    assert len(data) > 500 and KEY.encode() not in data and SECOND.encode() not in data


# -------------------------------------------------------------------------------------------------- the admin listener


def test_health_and_metrics_move_to_the_admin_listener(tmp_path: Path) -> None:
    with locked(tmp_path, admin=True) as gate:
        admin: str = gate.admin  # type: ignore[attr-defined]
        response = gate.do(gate.client.get, f"{admin}/health")
        question = gate.rig.receive("supervisor", m.AskHealth)
        gate.rig.send(m.Health(question.nonce, "ok", [], None), "supervisor.0")
        assert response.result().json()["status"] == "ok"
        for path in ("/health", "/metrics"):
            assert_refused(gate.client.get(path), "API key required")
            missing = gate.client.get(path, headers=RIGHT)
            assert (missing.status_code, "Not found" in missing.text) == (404, True)
        for path in ("/v1/models", "/load", "/version", "/reset_prefix_cache", "/"):
            for method in ("GET", "POST"):
                assert gate.client.request(method, f"{admin}{path}", headers=RIGHT).status_code == 404
        assert gate.client.post(f"{admin}/health").status_code == 405


def test_the_admin_listener_requires_no_key(tmp_path: Path) -> None:
    with locked(tmp_path, admin=True) as gate:
        gate.rig.send(m.Drain(0.0), "supervisor.0")
        gate.rig.receive("supervisor", m.Drained)
        response = gate.do(gate.client.get, f"{gate.admin}/health")  # type: ignore[attr-defined]
        question = gate.rig.receive("supervisor", m.AskHealth)
        gate.rig.send(m.Health(question.nonce, "ok", [], None), "supervisor.0")
        assert (response.result().status_code, response.result().json()["status"]) == (503, "draining")


# --------------------------------------------------------------------------------------------------------- ZeroMQ


def free_port(num: int = 1) -> int:
    """The first of `num` consecutive free ports."""
    for port in range(20_000 + os.getpid() % 10_000, 65_000, num):
        try:
            for one in range(port, port + num):
                socket.create_server(("127.0.0.1", one)).close()
        except OSError:
            continue
        return port
    raise AssertionError("no port is free")


def test_zmq_over_tcp_requires_a_key(tmp_path: Path) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    with locked(tmp_path, zmq=address) as gate:
        for shown, words in ((None, "API key required"), ("", "required"), (f"{KEY}x", "Invalid API key")):
            with RawPeer(address, hello=False) as peer:
                peer.send(p.Hello(2, 2, "a test", shown))
                failure = peer.receive(p.Error).failure
                assert (failure.status, failure.code) == (401, "invalid_api_key")
                assert words in failure.message and KEY not in failure.message
                assert peer.is_disconnected()
        with RawPeer(address, hello=False) as peer:  # an old client that does not know keys
            peer.send(msgspec.msgpack.encode(["hello", 2, 2]))
            assert peer.receive(p.Error).failure.status == 401
        with RawPeer(address, hello=False) as peer:
            peer.send(p.Hello(2, 2, "a test", SECOND))
            peer.receive(p.Welcome)
            peer.generate()
            gate.delta(gate.begin(), "Hi", finish=m.Finish.LENGTH)
            peer.receive(p.Accepted)
            assert peer.receive(p.Delta).outputs[0].text == "Hi"


def test_zmq_over_ipc_requires_no_key(gate: Gate) -> None:
    with RawPeer(gate) as peer:
        assert peer.is_still_served()


def test_a_long_message_before_hello_is_not_decoded(gate: Gate) -> None:
    long = generate(1, "x" * 100_000, credits=1)
    with RawPeer(gate, hello=False) as peer:
        peer.send(long)
        assert peer.receive(p.Error).failure.code == "no_hello"
        assert peer.is_disconnected()
