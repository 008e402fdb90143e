"""What clients of the command line say if TLS fails."""

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from pipeline.__main__ import main
from tests.runtime.security.test_tls import CERT, KEY


@contextmanager
def web_server(context: ssl.SSLContext | None) -> Iterator[int]:
    """A server that knows no path, with or without TLS. Yields its port."""
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("command", [("bench", "--duration", "1s"), ("chat",)])
def test_a_certificate_that_is_not_trusted_is_named(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERT, KEY)
    with web_server(context) as port:
        assert main([*command, "--url", f"https://127.0.0.1:{port}"]) == 1
    assert f"the certificate of https://127.0.0.1:{port} is not trusted (" in capsys.readouterr().err


def test_https_to_a_server_without_tls_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with web_server(None) as port:
        assert main(["bench", "--duration", "1s", "--url", f"https://127.0.0.1:{port}"]) == 1
    assert f"https://127.0.0.1:{port} does not answer with TLS: is it an http:// address?" in capsys.readouterr().err


@pytest.mark.parametrize("command", [("bench", "--duration", "1s"), ("chat",)])
def test_http_to_a_server_with_tls_is_named(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERT, KEY)
    with web_server(context) as port:
        assert main([*command, "--port", str(port)]) == 1
    assert f"if this port speaks HTTPS, use --url https://127.0.0.1:{port}\n" in capsys.readouterr().err
