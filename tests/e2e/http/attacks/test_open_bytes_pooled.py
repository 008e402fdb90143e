"""What open requests for vectors and scores keep in all processes is measured, as in test_open_bytes.py. Half of the
clients don't read their replies.

    PIPELINE_ALL_CASES=1 pytest tests/e2e/http/attacks/test_open_bytes_pooled.py     1,024 requests, the default limit
"""

import json
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.compiled import link_kernels
from tests.e2e.http.attacks.test_open_bytes import ALL, INTERVAL_S, MAX_OPEN_MIB, MIB, NUM_REQUESTS, WORK_MIB, Sampler
from tests.e2e.server import Server
from tests.stages.execute.encoders.tiny_encoders import Variant, make
from tests.stages.prepare.checkpoints import save_folder

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
}
TOKENIZER = {"tokenizer_class": "PreTrainedTokenizerFast"}
TEXT = "hello " * 400
LONG = "hello " * (MIB // 12)
FEW = 16 if ALL else 4
DOCUMENTS = 256 if ALL else 16
MOST_OPEN_MIB = MAX_OPEN_MIB + MAX_OPEN_MIB * 3 // 4 + max(16, MAX_OPEN_MIB // 4)
"""Complete replies beside the oldest request, and what else waits for its clients, may exceed the limit."""
LIMIT_S = 900.0 if ALL else 150.0

pytestmark = pytest.mark.timeout(1200 if ALL else 300)

Request = tuple[str, dict[str, Any]]
VECTORS: dict[str, Request] = {
    "tokens": ("/pooling", {"input": [TEXT], "task": "token_embed", "truncate_prompt_tokens": -1}),
    "tokens in base64": (
        "/pooling",
        {"input": [TEXT], "task": "token_embed", "encoding_format": "base64", "truncate_prompt_tokens": -1},
    ),
    "ids": ("/v1/embeddings", {"input": [[5 + i % 500 for i in range(500)]] * DOCUMENTS}),
    "texts": ("/v1/embeddings", {"input": ["hello"] * DOCUMENTS, "encoding_format": "base64"}),
    "one long text": ("/v1/embeddings", {"input": LONG, "truncate_prompt_tokens": -1}),
    "types": (
        "/v2/embed",
        {
            "texts": ["hello"] * DOCUMENTS,
            "input_type": "classification",
            "embedding_types": ["float", "base64", "binary", "ubinary"],
        },
    ),
    "pairs": ("/score", {"text_1": ["hello " * 30] * DOCUMENTS, "text_2": ["you " * 30] * DOCUMENTS}),
    "documents": (
        "/rerank",
        {"query": "hello " * 60, "documents": ["you " * 30] * DOCUMENTS, "return_documents": True},
    ),
}
SCORES: dict[str, Request] = {
    "long query": ("/v2/rerank", {"query": "hello " * 600, "documents": ["you " * 30] * DOCUMENTS}),
    "long documents": ("/v2/rerank", {"query": "hello", "documents": ["you " * 6000] * FEW}),
    "returned documents": (
        "/rerank",
        {
            "query": "hello",
            "documents": ["\x01" * 2000] * DOCUMENTS,
            "return_documents": True,
            "truncate_prompt_tokens": -1,
        },
    ),
    "pairs": ("/score", {"text_1": ["hello " * 30] * DOCUMENTS, "text_2": ["you " * 30] * DOCUMENTS}),
    "labels": ("/classify", {"input": ["hello"] * DOCUMENTS}),
}
HEADS = {"vectors": ("", VECTORS), "scores": ("sequence", SCORES)}


@pytest.fixture(params=HEADS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def server(kind: str, tmp_path: Path) -> Iterator[Server]:
    changes = {"num_labels": 1} if kind == "scores" else {}
    head, _ = HEADS[kind]
    save_folder(tmp_path / "tiny", make(Variant("bert", changes, SIZES, head)), tokenizer_config=TOKENIZER)
    rules = (
        f"model={tmp_path / 'tiny'}",
        f"cache_dir={link_kernels(tmp_path / 'cache')}",
        f"gateway.max_open_bytes={MAX_OPEN_MIB * MIB}",
    )
    with Server(*rules) as server:
        yield server


def open_unread(server: Server, request: Request) -> socket.socket:
    """Send a request whose reply is never read."""
    path, body = request
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    sock.settimeout(LIMIT_S)
    sock.connect((host, int(port)))
    data = json.dumps({"model": "tiny"} | body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    with suppress(OSError):  # refused while it was sent
        sock.sendall(head.encode() + data)
    return sock


def test_the_worst_requests_stay_within_the_limit(server: Server, kind: str) -> None:
    _, worst = HEADS[kind]
    requests = [list(worst.values())[number % len(worst)] for number in range(NUM_REQUESTS)]
    statuses: list[int] = []

    def read(request: Request) -> None:
        path, body = request
        with httpx.Client(base_url=server.url, timeout=LIMIT_S) as client:
            try:
                statuses.append(client.post(path, json={"model": "tiny"} | body).status_code)
            except httpx.TransportError:
                statuses.append(0)

    for name, request in worst.items():
        read(request)
        assert statuses[-1] == 200, f"{name}: it fits if nothing else is open"
    statuses.clear()
    server.until_idle()
    with ExitStack() as stack, Sampler(server) as sampler, httpx.Client(base_url=server.url, timeout=60) as client:
        with ThreadPoolExecutor(32) as threads:
            for one in threads.map(lambda request: open_unread(server, request), requests[::2]):
                stack.enter_context(one)
            list(threads.map(read, requests[1::2]))
        most_open = 0
        for _ in range(40):  # of clients that read nothing
            most_open = max(most_open, client.get("/load").json()["open_bytes"])
            time.sleep(INTERVAL_S)
        grown_mib = {name: size // MIB for name, size in sampler.most.items()}
        print(f"{kind}: grown {grown_mib} MiB, open {most_open / MIB:.1f} MiB, {Counter(statuses)}")
        assert most_open <= MOST_OPEN_MIB * MIB
        # Bodies that arrive too slowly are given up: one client can't send 1,024 of them at once. Until their time is
        # over, those that read nothing may hold all room.
        assert set(statuses) <= {200, 503, 0, 408}
        assert sum(grown_mib.values()) < MOST_OPEN_MIB + WORK_MIB, grown_mib
    with httpx.Client(base_url=server.url, timeout=60) as client:
        end = time.monotonic() + 60
        while client.get("/load").json()["open_bytes"]:
            assert time.monotonic() < end
            time.sleep(INTERVAL_S)
    server.until_idle()
