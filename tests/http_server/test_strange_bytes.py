"""Bytes that are not UTF-8, in each part of a request, at each listener: the reply is that of any invalid request."""

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.deploy.proxy.relay import Relay
from pipeline.http_server.access.guard import KEY_HEADER
from pipeline.http_server.apis.openai import error_json
from pipeline.http_server.errors import ApiError, shown
from pipeline.http_server.request_ids import HEADER as REQUEST_ID
from pipeline.http_server.time_left import HEADER as TIME_LEFT
from pipeline.runtime.log import limited_log
from pipeline.runtime.resume_points import RESUMABLE, RESUME
from tests.deploy.fake_replica import PATIENCE_S, FakeReplica, deployed
from tests.http_server.listeners import ALLOWED_ORIGIN, KEY, LISTENERS, Listener, listener

STRANGE = b"x\xff\xed\xa0\x80y"
"""A byte that is never part of UTF-8, and a surrogate."""
NAMES = (
    "Host", "Origin", "Content-Type", "Content-Encoding", "Content-Length", "Transfer-Encoding", "Expect", "Connection",
    "Upgrade", "Trailer", "Authorization", KEY_HEADER, REQUEST_ID, RESUMABLE, RESUME, TIME_LEFT, "Sec-Fetch-Site",
    "Accept", "Accept-Encoding", "Access-Control-Request-Method", "Access-Control-Request-Headers", "Cookie",
    "User-Agent", "Range", "If-None-Match", "anthropic-version", "X-Anything",
)  # fmt: skip
"""All headers that something here reads, and some that nothing does."""
LINES = (
    b"GET /live", b"GET /nothing", b"POST /v1/completions", b"POST /v1/messages", b"POST /api/chat",
    b"POST /abort_requests", b"OPTIONS /v1/models",
)  # fmt: skip
"""Each shape of an error, with and without a route. The bodies are invalid."""
TARGETS = (
    b"/" + STRANGE, b"/v1/messages/" + STRANGE, b"/api/" + STRANGE, b"/v1/models/" + STRANGE, b"/v1/models/%ff%ed%a0",
    b"/v1/responses/" + STRANGE + b"/input_items", b"/v1/responses/r?stream=" + STRANGE, b"/page/" + STRANGE,
    b"/server_info?config_format=" + STRANGE, b"/live?" + STRANGE,
    b"http://" + STRANGE + b"/live", b"http://localhost/" + STRANGE, b"*" + STRANGE,
)  # fmt: skip
BODY = b"[]"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"


def request(line: bytes, headers: dict[str, bytes], rest: bytes | None = None) -> bytes:
    lines = [line + b" HTTP/1.1", *(name.encode() + b": " + value for name, value in headers.items())]
    end = b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY) if rest is None else rest
    return b"\r\n".join([*lines, end])


def requests(one: Listener, key: bytes | None) -> Iterator[bytes]:
    """Each is one that the listener would take, but for one part."""
    usual = {"Host": b"localhost", "Content-Type": b"application/json"}
    usual |= {} if key is None else {"Authorization": b"Bearer " + key}
    for line in LINES:
        asked = {"Origin": ALLOWED_ORIGIN.encode(), "Access-Control-Request-Method": b"POST"}
        base = usual | (asked if line.startswith(b"OPTIONS") else {})
        for name in NAMES:
            own = name in ("Content-Length", "Transfer-Encoding")
            yield request(line, base | {name: STRANGE}, b"\r\n" if own else None)
        yield request(line, base | {"Content-Encoding": b"gzip"}, b"Content-Length: 3\r\n\r\n\xff\xfe\xfd")
        yield request(line, base, b"X" + STRANGE + b": 1\r\n\r\n")  # the name of a header
        yield request(line, base, CHUNKED + STRANGE + b"\r\n\r\n")  # the size of a chunk
        yield request(line, base, CHUNKED + b"2;" + STRANGE + b"\r\n[]\r\n0\r\nX-T: " + STRANGE + b"\r\n\r\n")
        yield request(line, base, CHUNKED + b"2\r\n[]\r\n0\r\n" + STRANGE + b": trailer\r\n\r\n")
        yield request(line, base, b"Content-Length: 6\r\n\r\n" + STRANGE)
    for target in TARGETS:
        for method in (b"GET", b"POST", b"DELETE", b"OPTIONS"):
            yield request(method + b" " + target, usual)
    if "ingress" in one.name:  # a gateway asks its supervisor, which is not there
        yield request(b"GET /metrics?replicas=" + STRANGE, usual)
    yield request(STRANGE + b" /live", usual)
    yield request(b"GET /live " + STRANGE, usual)


async def answer(one: Listener, data: bytes) -> tuple[int, bytes]:
    """Status and body of the reply, whatever its framing: the client sends nothing else."""
    reader, writer = await asyncio.open_connection(*one.address)
    try:
        writer.write(data)
        while True:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
            if (status := int(head.split()[1])) >= 200:
                break
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
        if fields.get(b"transfer-encoding") == b"chunked":
            return status, b""
        return status, await asyncio.wait_for(reader.readexactly(int(fields.get(b"content-length", 0))), PATIENCE_S)
    finally:
        writer.close()


@pytest.mark.parametrize("keys", [False, True], ids=["no keys", "keys"])
@pytest.mark.parametrize("name", LISTENERS)
async def test_bytes_that_are_not_utf8_are_no_fault_of_the_server(
    name: str, keys: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = asyncio.Semaphore(32)
    async with listener(name, tmp_path, monkeypatch, keys=keys) as one:

        async def check(data: bytes) -> str:
            async with gate:
                try:
                    status, body = await answer(one, data)
                except Exception as error:  # noqa: BLE001 - whatever it is, the request is named
                    return f"{error!r} for {data!r}"
            try:
                is_error = b"error" in body and bool(json.loads(body))
            except ValueError:
                return f"{status} with {body!r} for {data!r}"
            return "" if status < 500 and (status < 400 or is_error) else f"{status} with {body!r} for {data!r}"

        sent = [data for key in ((None, KEY.encode()) if keys else (None,)) for data in requests(one, key)]
        wrong = [text for text in await asyncio.gather(*map(check, sent)) if text]
        assert not wrong, f"{len(wrong)} of {len(sent)}:\n" + "\n".join(wrong[:8])
    # Connections that aiohttp gives up on, and errors of callbacks, have a traceback too.
    found = [record for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info]
    assert not found, [record.getMessage() for record in found]


def test_a_text_of_a_client_is_printable_in_each_shape_of_an_error() -> None:
    text = shown("a\udcff\x1b[31m\u202eb\nc")
    assert text.isprintable() and text == r"a\udcff\x1b[31m\u202eb\nc"
    error = ApiError(400, "the key 'a\udcff\x00' is wrong:\nline 2", "a\ud800")
    assert error.message == "the key 'a\\udcff\\x00' is wrong:\nline 2" and error.param == r"a\ud800"
    assert json.loads(error_json(error))["error"]["message"] == error.message


async def test_tracebacks_of_failed_requests_are_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Relay, "handle", fail)
    monkeypatch.setattr(limited_log, "INTERVAL_S", PATIENCE_S)
    num = 3 * limited_log.MAX_LINES
    async with deployed(FakeReplica()) as (ingress, client):
        for _ in range(num):
            async with client.get("/v1/models") as response:
                assert response.status == 500
        found = [record for record in caplog.records if record.exc_info]
        assert len(found) == limited_log.MAX_LINES and "more requests failed" not in caplog.text
        ingress._rejection_log._log._clock = lambda: float("inf")  # the next interval
        ingress._rejection_log.flush()
        (line,) = [record for record in caplog.records if record.getMessage() == "more requests failed"]
        assert line.fields == {"num": num - limited_log.MAX_LINES}  # type: ignore[attr-defined]
