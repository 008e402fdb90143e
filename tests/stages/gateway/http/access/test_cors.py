"""CORS: pages of allowed origins may send requests and read the responses; others get no header."""

import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipeline.config import load
from pipeline.config.load import ConfigError
from tests.rig import PATIENCE_S
from tests.stages.gateway.gate import CHAT, Gate
from tests.stages.gateway.http.access.test_guard import RIGHT, locked

PAGE = "https://chat.example.com"
PREFLIGHT = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}


def preflight(gate: Gate, **headers: str) -> httpx.Response:
    return gate.client.options("/v1/chat/completions", headers=PREFLIGHT | headers)


def cors_headers(response: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name.startswith("access-control-")}


def test_a_page_of_an_allowed_origin_can_use_a_server_with_keys(tmp_path: Path) -> None:
    with locked(tmp_path, allowed_origins=(PAGE,)) as gate:
        answer = preflight(gate)
        assert (answer.status_code, answer.content) == (204, b""), "browsers send no key with a preflight"
        assert answer.headers["Access-Control-Allow-Origin"] == PAGE
        assert answer.headers["Access-Control-Allow-Headers"] == "authorization"
        assert "POST" in answer.headers["Access-Control-Allow-Methods"]
        assert answer.headers["Vary"] == "Origin"
        assert "Access-Control-Allow-Credentials" not in answer.headers
        response = gate.do(gate.client.post, "/v1/chat/completions", json=CHAT, headers=RIGHT | {"Origin": PAGE})
        gate.serve()
        assert response.result().headers["Access-Control-Allow-Origin"] == PAGE
        assert "X-Request-Id" in response.result().headers["Access-Control-Expose-Headers"]
        # Errors too, also those from before any route, so that a page can show them.
        for status, headers, content in ((401, {}, b"{}"), (415, RIGHT | {"Content-Type": "text/plain"}, b"{}")):
            failed = gate.client.post("/v1/chat/completions", headers=headers | {"Origin": PAGE}, content=content)
            assert (failed.status_code, failed.headers["Access-Control-Allow-Origin"]) == (status, PAGE)


def test_streams_have_the_headers_too(tmp_path: Path) -> None:
    with Gate(tmp_path, allowed_origins=(PAGE,)) as gate:
        body = CHAT | {"stream": True}
        response = gate.do(gate.client.post, "/v1/chat/completions", json=body, headers={"Origin": PAGE})
        gate.serve()
        assert response.result().headers["Access-Control-Allow-Origin"] == PAGE


@pytest.mark.parametrize("has_keys", [False, True])
def test_other_origins_and_servers_without_allowed_origins_get_no_header(tmp_path: Path, has_keys: bool) -> None:
    server: Any = locked if has_keys else Gate
    for listed in ((PAGE,), ()):
        (folder := tmp_path / str(len(listed))).mkdir()
        with server(folder, allowed_origins=listed) as gate:
            answer = preflight(gate, Origin="https://evil.example")
            assert answer.status_code == (401 if has_keys and not listed else 403)
            response = gate.client.get("/v1/models", headers=RIGHT | {"Origin": "https://evil.example"})
            assert response.status_code == (200 if has_keys else 403)
            assert cors_headers(answer) == cors_headers(response) == {}
            assert cors_headers(gate.client.get("/v1/models", headers=RIGHT)) == {}


def test_allowed_methods_and_allowed_headers_limit_preflights(tmp_path: Path) -> None:
    with Gate(tmp_path, allowed_origins=("*",), allowed_methods=("post",), allowed_headers=("Authorization",)) as gate:
        assert preflight(gate).headers["Access-Control-Allow-Methods"] == "POST"
        assert preflight(gate).headers["Access-Control-Allow-Origin"] == "*"
        for code, headers in (
            ("method_not_allowed", {"Access-Control-Request-Method": "DELETE"}),
            ("header_not_allowed", {"Access-Control-Request-Headers": "content-type, x-other"}),
        ):
            refused = preflight(gate, **headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, code)
            assert "gateway.allowed_" in refused.json()["error"]["message"]


def test_allow_credentials_names_the_origin_since_browsers_do_not_accept_the_wildcard(tmp_path: Path) -> None:
    with Gate(tmp_path, allowed_origins=("*",), allow_credentials=True) as gate:
        headers = preflight(gate).headers
        assert headers["Access-Control-Allow-Origin"] == PAGE
        assert headers["Access-Control-Allow-Credentials"] == "true"


def test_dns_rebinding_is_refused_in_preflights_too(tmp_path: Path) -> None:
    with Gate(tmp_path, allowed_origins=(PAGE,)) as gate:
        assert preflight(gate, Host="evil.example").json()["error"]["code"] == "host_not_allowed"


def test_invalid_names_are_config_errors() -> None:
    with pytest.raises(ConfigError, match=r'gateway\.allowed_methods: "GET POST" is not the name of a method'):
        load.load(sets=["gateway.allowed_methods=GET POST"])
    with pytest.raises(ConfigError, match=r'gateway\.allowed_headers: "a:b" is not the name of a header'):
        load.load(sets=["gateway.allowed_headers=a:b"])


def test_no_response_names_versions(tmp_path: Path) -> None:
    with locked(tmp_path) as gate:
        responses = [gate.client.get("/v1/models", headers=RIGHT), gate.client.get("/v1/models"), preflight(gate)]
        assert [response.status_code for response in responses] == [200, 401, 401]
        assert {response.headers["Server"] for response in responses} == {"pipeline"}
        with socket.create_connection(gate.address, timeout=30) as connection:
            connection.sendall(b"no http at all\r\n\r\n")
            assert b"\r\nServer: pipeline\r\n" in connection.recv(10_000)


@pytest.mark.parametrize("name", ["Origin", "Access-Control-Request-Headers"])
@pytest.mark.parametrize("value", [b"https://\xff.example", b"x\xff", b"x\x0by"])
def test_what_no_header_may_have_is_not_repeated(tmp_path: Path, name: str, value: bytes) -> None:
    """Any origin with credentials, and any header, are answered with what the browser has sent."""
    with locked(tmp_path, allowed_origins=("*",), allow_credentials=True, allowed_headers=("*",)) as gate:
        headers = {key: given.encode() for key, given in PREFLIGHT.items()} | {name: value}
        lines = b"".join(key.encode() + b": " + given + b"\r\n" for key, given in headers.items())
        for method in (b"OPTIONS", b"GET"):
            with socket.create_connection(gate.address, PATIENCE_S) as connection:
                connection.sendall(method + b" /v1/models HTTP/1.1\r\nHost: localhost\r\n" + lines + b"\r\n")
                reply = connection.recv(65536)
            assert reply.split()[1] in ((b"400", b"403") if method == b"OPTIONS" else (b"400", b"401")), reply
            assert value not in reply
