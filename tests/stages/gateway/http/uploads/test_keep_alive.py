"""Keep-alives in streams without output."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.stages.gateway.http import response_writer
from pipeline.stages.gateway.http.keep_alive import KeepAlive
from tests.rig import PATIENCE_S
from tests.stages.gateway.gate import CHAT, COMPLETION, END, MODEL, Gate, read_until

COMMENT = b": keep-alive\n\n"
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
MESSAGES = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
CASES = [
    ("/v1/chat/completions", CHAT, COMMENT),
    ("/v1/completions", COMPLETION, COMMENT),
    ("/v1/responses", {"model": MODEL, "input": "Hi"}, COMMENT),
    ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {}}, COMMENT),
    ("/v1/messages", MESSAGES, PING),
]


@pytest.fixture(autouse=True)
def _headers_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_writer, "HEADERS_AFTER_S", 0.02)


def body_of(response: bytes) -> bytes:
    """The body of a chunked response."""
    rest, body = response.partition(b"\r\n\r\n")[2], b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return body


@pytest.mark.parametrize(("path", "body", "keep_alive"), CASES)
def test_a_silent_stream_gets_keep_alives_of_its_api_before_and_between_its_events(
    tmp_path: Path, path: str, body: dict[str, Any], keep_alive: bytes
) -> None:
    with Gate(tmp_path, sse_keep_alive_s=0.03) as gate:
        stream = gate.raw(body | {"stream": True}, path)
        submit = gate.begin()
        data = read_until(stream, keep_alive)
        gate.delta(submit, "Hel")
        data += read_until(stream, keep_alive) + read_until(stream, keep_alive)
        gate.finish(submit, "lo")
        data += read_until(stream, END)
        stream.close()
        events = body_of(data).split(b"\n\n")
        assert events.pop() == b""
        assert events.count(keep_alive.strip()) >= 3
        for event in events:
            payload = event.splitlines()[-1].removeprefix(b"data: ")
            if event != COMMENT.strip() and payload != b"[DONE]":
                json.loads(payload)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}),
        ("/api/generate", {"model": MODEL, "prompt": "Hi"}),
    ],
)
def test_a_silent_stream_of_lines_of_json_gets_spaces(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    """Readers of JSON skip them."""
    with Gate(tmp_path, sse_keep_alive_s=0.03) as gate:
        stream = gate.raw(body, path)
        submit = gate.begin()
        chunk = b"1\r\n \r\n"
        data = read_until(stream, chunk)
        gate.delta(submit, "Hel")
        data += read_until(stream, chunk) + read_until(stream, chunk)
        gate.finish(submit, "lo")
        data += read_until(stream, END)
        stream.close()
        lines = body_of(data).splitlines()
        assert lines[0].startswith(b" ") and b"  " in body_of(data)
        parts = [json.loads(line) for line in lines]
        texts = [one["message"]["content"] if path == "/api/chat" else one["response"] for one in parts]
        assert "".join(texts) == "Hello" and [one["done"] for one in parts] == [*(len(parts) - 1) * [False], True]


def test_sse_keep_alive_s_of_0_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with Gate(tmp_path, sse_keep_alive_s=0.0) as gate, Gate(tmp_path / "other", sse_keep_alive_s=0.03) as other:
        body = CHAT | {"stream": True}
        silent, noisy = gate.raw(body), other.raw(body)
        submits = gate.begin(), other.begin()
        for _ in range(3):
            read_until(noisy, COMMENT)
        gate.finish(submits[0], "Hello")
        other.finish(submits[1], "Hello")
        data = read_until(silent, END)
        assert b"Hello" in data and b"keep-alive" not in data
        silent.close()
        noisy.close()


async def test_nothing_comes_between_the_parts_of_an_event() -> None:
    written: list[bytes] = []
    transport = SimpleNamespace(is_closing=lambda: False, get_write_buffer_size=lambda: 0)
    http_request: Any = SimpleNamespace(transport=transport, writer=SimpleNamespace(output_size=9))
    with KeepAlive(http_request, PATIENCE_S, lambda: written.append(COMMENT)) as keep_alive:
        keep_alive.is_in_event = True
        keep_alive._check()
        keep_alive._check()
        assert not written
        keep_alive.is_in_event = False
        keep_alive._check()
        assert written == [COMMENT]
