"""Clients that don't read what they have asked for fill a server. Others are served nevertheless."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from pipeline.http_server.sockets.deliveries import GRACE_S
from tests.compiled import link_kernels
from tests.e2e.http.attacks.test_open_bytes_pooled import open_unread
from tests.e2e.server import Server

MAX_OPEN_BYTES = 64 * 1024**2
MOST = 40
"""Unread replies that must have filled the server. The kernel takes a part of each."""
SOON_S = 5.0
"""An ordinary request is served within this when slow clients are known to be slow, on a busy machine."""
UNREAD = ("/v1/completions", {"prompt": "hello " * 30, "max_tokens": 1, "n": 64, "echo": True, "logprobs": 20})
ORDINARY = {"model": "tiny", "prompt": "hello", "max_tokens": 1}


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    with Server(
        f"model={tiny_model}",
        f"cache_dir={link_kernels(tiny_model.parent / 'cache')}",
        f"gateway.max_open_bytes={MAX_OPEN_BYTES}",
    ) as server:
        yield server


def test_an_ordinary_request_is_served(server: Server) -> None:
    with ExitStack() as clients, httpx.Client(base_url=server.url, timeout=30.0) as client:
        held: list[socket.socket] = []

        def status() -> int:
            return client.post("/v1/completions", json=ORDINARY).status_code

        while status() == 200:
            assert len(held) < MOST, f"there is room: {client.get('/load').json()}"
            held.append(clients.enter_context(open_unread(server, UNREAD)))
            server.until(lambda health: health["running"] == health["waiting"] == 0)
        full_s = time.monotonic()
        while (found := status()) == 503:
            assert time.monotonic() < full_s + GRACE_S + SOON_S, client.get("/load").json()
        assert found == 200
    server.until_idle()
