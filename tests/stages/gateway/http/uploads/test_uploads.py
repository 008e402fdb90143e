"""The total size of bodies being uploaded is bounded, slow and silent senders don't hold up others, and every end of an
upload releases its budget."""

import functools
import gzip
import json
import select
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from pipeline.http_server.bodies import upload_budget
from pipeline.http_server.bodies.large_body_lock import LARGE_BYTES
from pipeline.http_server.bodies.upload_budget import MIN_BYTES_PER_S, NUM_BODIES, SMALL_BYTES, UploadBudget
from pipeline.stages.gateway.apis.openai import parsing as parse
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest, RequestLimits
from pipeline.stages.gateway.received import PARSERS
from tests.rig import PATIENCE_S
from tests.stages.gateway.gate import CHAT, COMPLETION, Gate, read_until
from tests.stages.gateway.test_metrics import counts_of

MAX_BODY = 2 * SMALL_BYTES
LARGE = json.dumps({"model": "another", "prompt": "x"}).encode().ljust(MAX_BODY)
"""Answered with 404 if the upload budget has room for it."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    monkeypatch.setattr(upload_budget, "GRACE_S", PATIENCE_S)  # no body is slow
    with Gate(tmp_path, max_body_bytes=MAX_BODY) as gate:
        yield gate


def expect_continue(gate: Gate, num_bytes: int = MAX_BODY, path: str = "/v1/completions") -> socket.socket:
    """A connection that has sent its headers with `Expect: 100-continue`."""
    connection = socket.create_connection(gate.address, timeout=PATIENCE_S)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: {num_bytes}\r\n\r\n"
    connection.sendall(head.encode())
    return connection


def stuck(gate: Gate) -> socket.socket:
    """A connection that sends most of a body and then stalls."""
    connection = expect_continue(gate)
    assert read_until(connection, b"\r\n\r\n") == CONTINUE
    connection.sendall(b" " * (MAX_BODY - 100))
    return connection


def silent(gate: Gate) -> socket.socket:
    """A connection that declares a large body and sends none of it."""
    connection = expect_continue(gate)
    assert read_until(connection, b"\r\n\r\n") == CONTINUE
    return connection


def is_refused(response: httpx.Response) -> bool:
    if response.status_code == 503:
        error = response.json()["error"]
        assert error["code"] == "overloaded" and "bytes are free for large bodies" in error["message"]
        assert int(response.headers["Retry-After"]) >= 1
        return True
    return False


def send(gate: Gate, content: bytes | Iterator[bytes] = LARGE, **headers: str) -> httpx.Response:
    return httpx.post(f"{gate.url}/v1/completions", content=content, headers=headers, timeout=PATIENCE_S)


def is_readable(connection: socket.socket) -> bool:
    return bool(select.select([connection], [], [], 0.0)[0])


def in_chunks(num_bytes: int) -> Iterator[bytes]:
    for _ in range(num_bytes // 4096):
        yield b" " * 4096


def assert_budget_is_free(gate: Gate) -> None:
    """Exactly the allowed number of uploads is accepted. A disconnect may take a moment to be noticed."""
    gate.rig.until(lambda _: not is_refused(send(gate)))
    with ExitStack() as stack:
        for _ in range(NUM_BODIES):
            stack.enter_context(stuck(gate))
        assert is_refused(send(gate))


class TestExhaustedBudget:
    def test_large_bodies_are_refused_at_once_and_small_ones_served(self, gate: Gate) -> None:
        with ExitStack() as stack:
            for _ in range(NUM_BODIES):
                stack.enter_context(stuck(gate))
            gate.rig.until(lambda _: is_refused(send(gate)))  # the gateway has read all of them
            num_refused = counts_of(gate).num_overloaded
            assert is_refused(send(gate))
            assert is_refused(send(gate, in_chunks(MAX_BODY))), "a chunked body is counted as it grows"
            packed = gzip.compress(LARGE)
            assert is_refused(send(gate, packed, **{"Content-Encoding": "gzip"})), "counted unpacked"
            with expect_continue(gate) as connection:
                answer = read_until(connection, b"}}")
                assert answer.startswith(b"HTTP/1.1 503 ") and b"Retry-After: " in answer
            assert counts_of(gate).num_overloaded == num_refused + 4
            small = gate.complete(json.dumps(COMPLETION).encode().ljust(SMALL_BYTES))
            gate.serve()
            assert small.result().status_code == 200
        assert_budget_is_free(gate)

    def test_the_budget_is_never_exceeded(self) -> None:
        room = UploadBudget(MAX_BODY)
        uploads = [room.upload(pytest.fail) for _ in range(NUM_BODIES + 1)]
        for upload in uploads[:-1]:
            upload.grow(MAX_BODY)
        for refuse in (lambda: room.check_room(MAX_BODY), lambda: uploads[-1].grow(MAX_BODY)):
            with pytest.raises(ApiError) as raised:
                refuse()
            assert (raised.value.status, raised.value.code) == (503, "overloaded")
        assert room.num_bytes == room.max_bytes
        for upload in uploads:
            upload.release()
        assert room.num_bytes == 0


class TestSlowSenders:
    def test_declared_lengths_take_no_room(self, gate: Gate) -> None:
        with ExitStack() as stack:
            for _ in range(4 * NUM_BODIES):
                stack.enter_context(silent(gate))
            assert send(gate).status_code == 404

    def test_stalled_bodies_are_given_up_for_others(self, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
        with ExitStack() as stack:
            connections = [stack.enter_context(stuck(gate)) for _ in range(NUM_BODIES)]
            gate.rig.until(lambda _: is_refused(send(gate)))
            monkeypatch.setattr(upload_budget, "GRACE_S", 0.0)
            monkeypatch.setattr(upload_budget, "MIN_BYTES_PER_S", 2**40)
            assert send(gate).status_code == 404
            assert send(gate, in_chunks(MAX_BODY)).status_code == 400, "so do bodies of unknown length"
            given_up = read_until(next(one for one in connections if is_readable(one)), b"}}")
            assert given_up.startswith(b"HTTP/1.1 408 ") and b"while other clients needed its room" in given_up

    def test_the_slowest_are_given_up_and_only_as_many_as_needed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now_s = 0.0
        monkeypatch.setattr("pipeline.http_server.bodies.upload_budget.time.monotonic", lambda: now_s)
        stopped: list[int] = []
        room = UploadBudget(MAX_BODY)
        uploads = [room.upload(functools.partial(stopped.append, index)) for index in range(NUM_BODIES)]
        for index, upload in enumerate(uploads):
            upload.grow(MAX_BODY - 8 * (NUM_BODIES - index))  # the first is the slowest
        uploads[0].complete()
        now_s = 1.01 * MAX_BODY / MIN_BYTES_PER_S
        fast = room.upload(pytest.fail)
        with pytest.raises(ApiError):
            fast.grow(MAX_BODY)
        assert not stopped, "none is slow before the grace is over"
        now_s = max(now_s, upload_budget.GRACE_S)
        fast.grow(MAX_BODY)
        assert stopped == [1] and uploads[1].why_given_up == "slow"
        uploads[1].grow(MAX_BODY)
        assert uploads[1].num_counted == 0, "what a body still sends after it was given up does not count"
        for upload in (*uploads, fast):
            upload.release()
        assert room.num_bytes == 0


class TestBudgetIsReleased:
    @pytest.mark.parametrize(
        ("end", "status"),
        [
            (lambda gate: send(gate), 404),
            (lambda gate: send(gate, in_chunks(MAX_BODY)), 400),
            (lambda gate: send(gate, in_chunks(2 * MAX_BODY)), 413),
            (lambda gate: send(gate, b"x" * MAX_BODY, **{"Content-Encoding": "gzip"}), 400),
            (lambda gate: send(gate, LARGE, **{"Content-Encoding": "foo"}), 415),
        ],
        ids=["read", "read in chunks", "too large", "unreadable", "refused"],
    )
    def test_after_every_end_of_an_upload(self, gate: Gate, end: Callable[[Gate], httpx.Response], status: int) -> None:
        for _ in range(NUM_BODIES + 1):
            assert end(gate).status_code == status
        assert_budget_is_free(gate)

    def test_when_clients_disconnect(self, gate: Gate) -> None:
        for _ in range(2):
            connections = [stuck(gate) for _ in range(NUM_BODIES)]
            assert is_refused(send(gate))
            for connection in connections:
                connection.close()
            gate.rig.until(lambda _: not is_refused(send(gate)))
        assert_budget_is_free(gate)

    def test_when_uploads_time_out(self, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch, ExitStack() as stack:
            patch.setattr("pipeline.http_server.bodies.body_reader.BODY_TIMEOUT_S", 0.5)
            for connection in [stack.enter_context(stuck(gate)) for _ in range(NUM_BODIES)]:
                assert read_until(connection, b"}}").startswith(b"HTTP/1.1 408 ")
        assert_budget_is_free(gate)


class TestExpectContinue:
    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
    def test_a_full_server_answers_503_before_the_body(self, tmp_path: Path, path: str) -> None:
        with Gate(tmp_path, max_open_sequences=1) as gate:
            response = gate.post(CHAT)
            submit = gate.begin()
            with expect_continue(gate, path=path) as connection:
                answer = read_until(connection, b"}}")
                assert answer.startswith(b"HTTP/1.1 503 ")
                assert b"Retry-After: " in answer and b"Connection: close" in answer and b'"overloaded"' in answer
            gate.finish(submit)
            assert response.result().status_code == 200
            gate.rig.until(lambda load: load.num_open_requests == 0)
            with expect_continue(gate, 2, path) as connection:
                assert read_until(connection, b"\r\n\r\n") == CONTINUE

    def test_a_too_large_body_is_413_before_it_is_sent(self, gate: Gate) -> None:
        with expect_continue(gate, MAX_BODY + 1) as connection:
            assert read_until(connection, b"}}").startswith(b"HTTP/1.1 413 ")

    def test_a_starting_server_answers_503(self, tmp_path: Path) -> None:
        with Gate(tmp_path, start=False) as gate, expect_continue(gate) as connection:
            answer = read_until(connection, b"}}")
            assert answer.startswith(b"HTTP/1.1 503 ") and b'"starting"' in answer and b"Retry-After: " in answer


def test_small_uploads_are_not_counted() -> None:
    room = UploadBudget(MAX_BODY)
    upload = room.upload(pytest.fail)
    upload.grow(SMALL_BYTES)
    assert room.num_bytes == 0
    upload.grow(SMALL_BYTES + 1)
    assert room.num_bytes == SMALL_BYTES + 1
    upload.release()
    assert room.num_bytes == 0


def test_other_clients_are_served_while_a_large_body_is_parsed(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, may_end = threading.Event(), threading.Event()
    original = parse.parse_completion

    def parse_slowly(body: bytes, limits: RequestLimits) -> ParsedRequest:
        if len(body) > LARGE_BYTES:
            inside.set()
            assert may_end.wait(PATIENCE_S)
        return original(body, limits)

    monkeypatch.setitem(PARSERS, "completions", parse_slowly)
    with ThreadPoolExecutor(1) as pool:
        body = COMPLETION | {"prompt": "a" * LARGE_BYTES, "max_tokens": -1}
        large = pool.submit(gate.client.post, "/v1/completions", json=body)
        assert inside.wait(PATIENCE_S)
        small = gate.client.post("/v1/completions", json=COMPLETION | {"max_tokens": -1})
        may_end.set()
        assert (small.status_code, large.result(PATIENCE_S).status_code) == (400, 400)
