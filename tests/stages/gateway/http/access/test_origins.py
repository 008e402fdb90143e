"""A server without API keys refuses requests that a browser sends for another site."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.runtime import messages as m
from tests.stages.gateway.gate import CHAT, Gate
from tests.stages.gateway.http.access.test_guard import RIGHT, locked

EVERYWHERE = [
    ("GET", "/version"),
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("GET", "/docs"),
    ("GET", "/nothing"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/abort_requests"),
    ("OPTIONS", "/v1/chat/completions"),
    ("HEAD", "/v1/models"),
]
FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "notlocalhost",
    "user@localhost",
    "",
]
OWN = [
    "localhost",
    "LOCALHOST:1",
    "localhost.:8000",
    "app.localhost:8000",
    "127.0.0.1",
    "192.168.7.7:80",
    "[::1]:8000",
    "[FE80::1]",
]


def assert_forbidden(response: Any, code: str, setting: str) -> None:
    assert response.status_code == 403, response.text
    assert response.headers["Content-Type"].startswith("application/json")
    if response.request.method != "HEAD":
        error = response.json()["error"]
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, code)
        assert setting in error["message"]


def raw(gate: Gate, head: str) -> bytes:
    """Everything that is received until the server closes the connection."""
    with socket.create_connection(gate.address, timeout=30) as connection:
        connection.sendall(head.replace("\n", "\r\n").encode())
        return b"".join(iter(lambda: connection.recv(65536), b""))


class TestHosts:
    @pytest.mark.parametrize(("method", "path"), EVERYWHERE)
    def test_a_foreign_host_is_refused_on_every_route(self, gate: Gate, method: str, path: str) -> None:
        body = json.dumps(CHAT) if method == "POST" else None
        headers = {"Host": "evil.example:8000", "Content-Type": "application/json", "X-Request-Id": "mine"}
        refused = gate.client.request(method, path, content=body, headers=headers)
        assert_forbidden(refused, "host_not_allowed", "gateway.allowed_hosts=evil.example,")
        assert (refused.headers["X-Request-Id"], refused.headers["Connection"]) == ("mine", "close")
        assert gate.rig.nothing("ingest", 0) and gate.rig.nothing("schedule", 0)

    @pytest.mark.parametrize("host", FOREIGN)
    def test_foreign_hosts_are_refused(self, gate: Gate, host: str) -> None:
        assert gate.client.get("/version", headers={"Host": host}).status_code == 403

    @pytest.mark.parametrize("host", OWN)
    def test_own_hosts_are_accepted(self, gate: Gate, host: str) -> None:
        assert gate.client.get("/version", headers={"Host": host}).status_code == 200

    def test_a_listed_host_is_allowed(self, tmp_path: Path) -> None:
        with Gate(tmp_path, host="llm.internal", allowed_hosts=("Pipeline.svc", "*.example.com")) as gate:
            for host in ("llm.internal:8000", "pipeline.svc.", "a.example.com"):
                assert gate.client.get("/version", headers={"Host": host}).status_code == 200, host
            for host in ("example.com", "pipeline", "internal"):
                assert gate.client.get("/version", headers={"Host": host}).status_code == 403, host

    def test_the_host_of_an_absolute_target_is_checked(self, gate: Gate) -> None:
        for target, status in (("http://evil.example/version", b"403"), ("http://localhost:1/version", b"200")):
            reply = raw(gate, f"GET {target} HTTP/1.1\nHost: 127.0.0.1\nConnection: close\n\n")
            assert reply.startswith(b"HTTP/1.1 " + status), reply

    def test_a_request_must_have_exactly_one_host(self, gate: Gate) -> None:
        two = raw(gate, "GET /version HTTP/1.1\nHost: localhost\nHost: evil.example\nConnection: close\n\n")
        assert two.split()[1] in (b"400", b"403")
        none = raw(gate, "GET /version HTTP/1.1\nConnection: close\n\n")
        assert none.split()[1] in (b"400", b"403")
        assert raw(gate, "GET /version HTTP/1.0\n\n").startswith(b"HTTP/1.0 200")  # no browser sends this

    def test_a_refused_client_gets_no_100_continue(self, gate: Gate) -> None:
        head = "POST /v1/completions HTTP/1.1\nHost: evil.example\nContent-Length: 9\nExpect: 100-continue\n\n"
        with socket.create_connection(gate.address, timeout=30) as connection:
            connection.sendall(head.replace("\n", "\r\n").encode())
            assert connection.recv(65536).startswith(b"HTTP/1.1 403 ")


class TestOrigins:
    @pytest.mark.parametrize(("method", "path"), EVERYWHERE)
    def test_a_foreign_origin_is_refused_on_every_route(self, gate: Gate, method: str, path: str) -> None:
        body = json.dumps(CHAT) if method == "POST" else None
        headers = {"Origin": "https://evil.example", "Content-Type": "application/json"}
        refused = gate.client.request(method, path, content=body, headers=headers)
        assert_forbidden(refused, "origin_not_allowed", "--set gateway.allowed_origins=https://evil.example")
        assert gate.rig.nothing("ingest", 0) and gate.rig.nothing("schedule", 0)

    def test_an_origin_must_match_in_scheme_host_and_port(self, gate: Gate) -> None:
        def status(host: str, origin: str) -> int:
            return gate.client.get("/version", headers={"Host": host, "Origin": origin}).status_code

        own = [
            ("localhost:8000", "http://localhost:8000"),
            ("localhost", "http://LOCALHOST"),
            ("[::1]", "http://[::1]:80"),
        ]
        assert [status(*one) for one in own] == [200] * len(own)
        others = [
            ("localhost:8000", "http://localhost"),
            ("localhost:8000", "http://localhost:3000"),
            ("localhost:8000", "https://localhost:8000"),
            ("localhost:8000", "http://127.0.0.1:8000"),
            ("localhost:8000", "http://a.localhost:8000"),
            ("localhost", "https://localhost"),
            ("localhost:8000", "http://localhost:8000/"),
            ("localhost:8000", "null"),
            ("localhost:8000", ""),
        ]
        assert [status(*one) for one in others] == [403] * len(others)

    def test_a_listed_origin_is_allowed(self, tmp_path: Path) -> None:
        with Gate(tmp_path, allowed_origins=("https://Chat.example.com", "app://obsidian.md")) as gate:
            for origin, status in (
                ("https://chat.example.com", 200),
                ("https://chat.example.com:443", 200),
                ("app://obsidian.md", 200),
                ("http://chat.example.com", 403),
                ("https://example.com", 403),
                ("null", 403),
            ):
                assert gate.client.get("/version", headers={"Origin": origin}).status_code == status, origin
            headers = {"Origin": "https://chat.example.com", "Host": "evil.example"}
            assert gate.client.get("/version", headers=headers).status_code == 403

    def test_a_wildcard_allows_all_origins(self, tmp_path: Path) -> None:
        with Gate(tmp_path, allowed_origins=("*",)) as gate:
            assert gate.client.get("/version", headers={"Origin": "https://any.example"}).status_code == 200

    def test_each_of_two_origins_is_checked(self, gate: Gate) -> None:
        head = "GET /version HTTP/1.1\nHost: localhost\nOrigin: http://localhost\nOrigin: http://evil.example\n\n"
        assert raw(gate, head).startswith(b"HTTP/1.1 403")

    def test_a_post_without_origin_is_judged_by_sec_fetch_site(self, gate: Gate) -> None:
        def status(site: str) -> int:
            return gate.client.post("/abort_requests", content=b"{", headers={"Sec-Fetch-Site": site}).status_code

        assert [status(site) for site in ("cross-site", "same-site", "same-origin", "none")] == [403, 403, 400, 400]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/abort_requests", "/reset_prefix_cache", "/tokenize"])
@pytest.mark.parametrize(
    "given", ["text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded"]
)
def test_media_types_of_html_forms_are_refused(gate: Gate, path: str, given: str) -> None:
    response = gate.client.post(path, content=json.dumps(CHAT), headers={"Content-Type": given})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (415, "unsupported_media_type")
    assert "-H 'Content-Type: application/json'" in error["message"]
    assert gate.rig.nothing("ingest", 0) and gate.rig.nothing("schedule", 0)


@pytest.mark.parametrize("given", ["application/jsonp", "text/json", "application/json-seq", "*/*", "json", ""])
def test_other_media_types_are_refused(gate: Gate, given: str) -> None:
    response = gate.client.post("/tokenize", content=b"{}", headers={"Content-Type": given})
    assert response.status_code == 415


FORM = "application/x-www-form-urlencoded"
OLLAMA_CHAT = CHAT | {"stream": False}


def test_ollama_s_routes_take_curl_s_default_type(gate: Gate) -> None:
    response = gate.do(gate.client.post, "/api/chat", content=json.dumps(OLLAMA_CHAT), headers={"Content-Type": FORM})
    gate.serve("Hello")
    assert (response.result().status_code, response.result().json()["message"]["content"]) == (200, "Hello")


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": FORM, "Origin": "http://localhost"},
        {"Content-Type": FORM, "Origin": "null"},
        {"Content-Type": FORM, "Sec-Fetch-Site": "same-origin"},
        {"Content-Type": "text/plain"},
        {"Content-Type": "multipart/form-data; boundary=x"},
    ],
)
def test_ollama_s_routes_take_no_forms_of_browsers(tmp_path: Path, headers: dict[str, str]) -> None:
    with Gate(tmp_path, allowed_origins=("*",)) as gate:
        response = gate.client.post("/api/chat", content=json.dumps(OLLAMA_CHAT), headers=headers)
        assert (response.status_code, list(response.json())) == (415, ["error"])
        assert gate.rig.nothing("ingest", 0)


def test_a_cache_reset_requires_no_body_and_no_media_type(gate: Gate) -> None:
    response = gate.do(gate.client.post, "/reset_prefix_cache")
    question = gate.rig.receive("schedule", m.ResetPrefixCache)
    gate.rig.send(m.PrefixCacheReset(0, question.nonce, 5), "detokenize.0")
    assert (response.result().status_code, response.result().json()) == (200, {"num_blocks": 5})


@pytest.fixture
def admin(tmp_path: Path) -> Iterator[tuple[Gate, str]]:
    """A server without keys, and its admin listener."""
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    gate = Gate(tmp_path)
    gate.rig.launch = msgspec.structs.replace(gate.rig.launch, admin_fd=listener.detach())
    with gate:
        yield gate, url


def test_the_admin_listener_refuses_foreign_hosts_and_origins(admin: tuple[Gate, str]) -> None:
    gate, url = admin
    for path in ("/health", "/metrics"):
        assert_forbidden(
            gate.client.get(url + path, headers={"Host": "evil.example"}), "host_not_allowed", "allowed_hosts"
        )
        refused = gate.client.get(url + path, headers={"Origin": "http://evil.example"})
        assert_forbidden(refused, "origin_not_allowed", "allowed_origins")
    health = gate.do(gate.client.get, f"{url}/health")
    question = gate.rig.receive("supervisor", m.AskHealth)
    gate.rig.send(m.Health(question.nonce, "ok", [], None), "supervisor.0")
    assert health.result().status_code == 200


def test_with_api_keys_hosts_and_origins_are_not_checked(tmp_path: Path) -> None:
    with locked(tmp_path) as gate:
        headers = RIGHT | {"Host": "evil.example", "Origin": "https://evil.example"}
        assert gate.client.get("/version", headers=headers).status_code == 200
        response = gate.client.post("/tokenize", content=b"{}", headers=headers | {"Content-Type": "text/plain"})
        assert response.status_code == 415
        assert gate.client.post("/tokenize", content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 401
