"""HTTPS: the same API over TLS, with client certificates if the settings ask for them."""

import socket
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.rig import PATIENCE_S
from tests.runtime.security.test_tls import CA, CERT, KEY, TLS
from tests.stages.gateway.gate import CHAT, Gate

FILES: dict[str, Any] = {"ssl_certfile": CERT, "ssl_keyfile": KEY}
CLIENT_FILES = (TLS / "client.pem", TLS / "client.key")


def client_of(gate: Gate, *, has_certificate: bool = False) -> httpx.Client:
    """A client that verifies the server's certificate."""
    context = ssl.create_default_context(cafile=CA)
    if has_certificate:
        context.load_cert_chain(*CLIENT_FILES)
    return httpx.Client(base_url=gate.url.replace("http:", "https:"), verify=context, timeout=PATIENCE_S)


def test_whole_replies_and_streams_arrive_over_tls(tmp_path: Path) -> None:
    with Gate(tmp_path, sse_keep_alive_s=0.05, **FILES) as gate, client_of(gate) as client:
        response = gate.do(client.post, "/v1/chat/completions", json=CHAT)
        gate.serve("Hello")
        assert response.result().json()["choices"][0]["message"]["content"] == "Hello"
        begun = gate.do(gate.begin)
        with client.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as stream:
            submit = begun.result()
            lines = stream.iter_lines()
            gate.delta(submit, "x" * 300_000)
            assert any("xxx" in line for line in lines)
            assert any(line == ": keep-alive" for line in lines)
            gate.finish(submit, "y" * 300_000)
            assert list(lines)[-2:] == ["data: [DONE]", ""]
        own = str(client.base_url).rstrip("/")
        assert client.get("/version", headers={"Origin": own}).status_code == 200, "the server's own pages use https"
        assert own in client.get("/docs").text


def test_plain_http_is_not_served_and_does_not_disturb(tmp_path: Path) -> None:
    with Gate(tmp_path, **FILES) as gate, client_of(gate) as client:
        with socket.create_connection(gate.address, timeout=PATIENCE_S) as connection:
            connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.recv(1000).startswith(b"HTTP/1.1 400 "), "in words, without TLS"
        assert client.get("/version").status_code == 200


def test_ssl_ca_certs_requires_a_client_certificate(tmp_path: Path) -> None:
    with Gate(tmp_path, ssl_ca_certs=CA, **FILES) as gate:
        with client_of(gate) as client, pytest.raises((httpx.ReadError, httpx.RemoteProtocolError, httpx.ConnectError)):
            client.get("/version")
        with client_of(gate, has_certificate=True) as client:
            assert client.get("/version").status_code == 200
