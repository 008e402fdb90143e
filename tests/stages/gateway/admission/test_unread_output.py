"""Output that clients don't take gives way when others need its room: complete replies, the backlogs of streams, events
of background responses, and messages over ZeroMQ."""

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pipeline.client import protocol as p
from pipeline.http_server.sockets import deliveries
from pipeline.runtime import messages as m
from tests.rig import PATIENCE_S
from tests.stages.gateway.admission.test_preemption import MAX_BYTES, WHOLE, grow, load, until
from tests.stages.gateway.apis.poolers import EMBEDDER, give
from tests.stages.gateway.apis.responses.bodies import PATH
from tests.stages.gateway.gate import COMPLETION, MODEL, Gate, read_until
from tests.stages.gateway.http.access.test_guard import KEY, SECOND, locked
from tests.stages.gateway.http.uploads.test_unread_replies import BUFFER_BYTES, connection_to, read_all
from tests.stages.gateway.peers import RawPeer, TcpPeer, free_port
from tests.stages.gateway.test_metrics import counts_of
from tests.zmq_requests import generate

LONG_S = 1000.0
GRACE_S = 0.2
SETTINGS: dict[str, Any] = {
    "send_buffer_bytes": BUFFER_BYTES,
    "max_open_bytes": MAX_BYTES,
    "slow_client_timeout_s": LONG_S,
}
TEXT = "x" * 30_000
"""Of a reply that counts as about a seventh of the bytes."""


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliveries, "GRACE_S", GRACE_S)
    monkeypatch.setattr(deliveries, "SAMPLE_S", GRACE_S / 10)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    with Gate(tmp_path, **SETTINGS) as gate:
        yield gate


def unread(gate: Gate, body: dict[str, Any], path: str = "/v1/completions", key: str = "") -> socket.socket:
    """A connection that has sent a request, and reads nothing."""
    connection, content = connection_to(gate.address), json.dumps(body).encode()
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{authorization}Content-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def fill(gate: Gate, clients: ExitStack, body: dict[str, Any] = COMPLETION, key: str = "") -> list[socket.socket]:
    """Complete replies that are not read, until no more is admitted."""
    held = []
    for _ in range(20):
        held.append(clients.enter_context(unread(gate, body, key=key)))
        gate.serve(TEXT)
        gate.closed()
        if load_of(gate, key)["open_bytes"] > MAX_BYTES * 3 // 4:
            return held
    raise AssertionError("there was room for all, so the test proves nothing")


def load_of(gate: Gate, key: str) -> dict[str, int]:
    gate.rig.load()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    found: dict[str, int] = gate.client.get("/load", headers=headers).json()
    return found


def until_admitted(gate: Gate, body: dict[str, Any], key: str = "") -> "tuple[m.Submit, Future[Any]]":
    """Send a request, again and again as long as there is no room."""
    end = time.monotonic() + PATIENCE_S
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    while True:
        assert time.monotonic() < end, "no room was made"
        reply = gate.do(gate.client.post, "/v1/completions", json=body, headers=headers)
        while gate.rig.nothing("ingest", 0.01):
            if reply.done():
                break
        else:
            return gate.begin(), reply
        assert reply.result().status_code == 503


LARGE = COMPLETION | {"prompt": "x" * 100_000, "max_tokens": 8}
"""A request that does not fit what the others leave."""


def test_others_get_the_room_of_complete_replies_that_are_not_read(gate: Gate) -> None:
    with ExitStack() as clients:
        held = fill(gate, clients)
        submit, reply = until_admitted(gate, LARGE)
        gate.finish(submit)
        assert reply.result().status_code == 200
        assert any(b"}]}" not in read_all(one)[-10:] for one in held[:1])
    until(gate, lambda found: found["open_bytes"] == found["open_sequences"] == found["open_tokens"] == 0)


def test_as_long_as_no_other_needs_the_room_they_keep_it(gate: Gate) -> None:
    with ExitStack() as clients:
        held = fill(gate, clients)
        end = time.monotonic() + 3 * GRACE_S
        num_bytes = load(gate)["open_bytes"]
        while time.monotonic() < end:
            assert load(gate)["open_bytes"] == num_bytes
        for one in held:
            read_until(one, b'"usage"')


def test_a_client_that_reads_fast_enough_keeps_its_reply(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliveries, "MIN_BYTES_PER_S", 1)
    with ExitStack() as clients:
        slow, *_ = fill(gate, clients)
        data = read_until(slow, b"HTTP/1.1 200")
        future: Future[bytes] = gate.do(trickle, slow)
        submit, reply = until_admitted(gate, LARGE)
        gate.finish(submit)
        assert reply.result().status_code == 200
        assert b'"usage"' in data + future.result()


def trickle(connection: socket.socket) -> bytes:
    """All of a reply, in small parts."""
    data = b""
    while b'"usage"' not in data:
        more = connection.recv(2000)
        assert more, "it was given up"
        data += more
        time.sleep(0.002)
    return data


def test_their_sequences_and_prompt_tokens_are_given_back_too(tmp_path: Path) -> None:
    """A request for n = 128 sequences takes 128 of 1,024 places, and its reply need not be large."""
    with Gate(tmp_path, **SETTINGS, max_open_sequences=4) as gate, ExitStack() as clients:
        clients.enter_context(unread(gate, COMPLETION | {"n": 4}))
        gate.serve("x" * 20_000)
        gate.closed()
        submit, reply = until_admitted(gate, COMPLETION)
        gate.finish(submit, "y")
        assert reply.result().json()["choices"][0]["text"] == "y"


def test_a_stream_whose_client_takes_nothing_gives_back_its_backlog(gate: Gate) -> None:
    with ExitStack() as clients:
        clients.enter_context(unread(gate, WHOLE | {"stream": True, "max_tokens": 400}))
        stream = gate.begin()
        while load(gate)["open_bytes"] < MAX_BYTES * 3 // 4:
            grow(gate, stream, 10)
        reply = gate.complete(WHOLE)
        other = gate.begin()
        grow(gate, other, 10)
        message = gate.rig.receive("schedule")
        was_preempted = message == m.Closed(other.request_id, 1)
        if was_preempted:  # the stream was not slow yet
            message = gate.rig.receive("schedule")
        assert message.request_id == stream.request_id and isinstance(message, m.Abort)
        gate.finish(stream, finish=m.Finish.ABORT)
        if was_preempted:
            other = gate.submit()
            gate.continue_at(other, 0, 0)
            gate.accept(other)
            grow(gate, other, 10)
        grow(gate, other, 1, m.Finish.LENGTH)
        assert reply.result().status_code == 200
    until(gate, lambda found: found["open_bytes"] == found["open_sequences"] == 0)


def test_a_request_that_had_to_wait_goes_on_when_slow_clients_lose_theirs(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else happens meanwhile."""
    with ExitStack() as clients:
        monkeypatch.setattr(deliveries, "GRACE_S", LONG_S)
        fill(gate, clients)
        reply = gate.complete(WHOLE)
        submit = gate.begin()
        grow(gate, submit, 10)
        assert gate.closed() == (submit.request_id, 1), "even the oldest waits"
        monkeypatch.setattr(deliveries, "GRACE_S", GRACE_S)
        again = gate.submit()
        assert (again.request_id, again.attempt) == (submit.request_id, 2)
        gate.continue_at(again, 0, 0)
        gate.accept(again)
        grow(gate, again, 11, m.Finish.LENGTH)
        assert reply.result().json()["usage"]["completion_tokens"] == 88


def test_a_key_within_its_share_need_not_wait_until_the_others_are_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a key that always has new replies unread would keep all of the room."""
    monkeypatch.setattr(deliveries, "GRACE_S", LONG_S)
    monkeypatch.setattr(deliveries, "SHARE_GRACE_S", 0.0)
    with locked(tmp_path, **SETTINGS) as gate, ExitStack() as clients:
        fill(gate, clients, key=KEY)
        refused = gate.client.post("/v1/completions", json=LARGE, headers={"Authorization": f"Bearer {KEY}"})
        assert refused.status_code == 503
        submit, reply = until_admitted(gate, LARGE, key=SECOND)
        gate.finish(submit)
        assert reply.result().status_code == 200


def test_events_of_a_background_response_that_a_client_does_not_read(gate: Gate) -> None:
    """They count although the request is over, and its response is stored no more."""
    with ExitStack() as clients:
        body = {"model": MODEL, "input": "i", "instructions": "a" * 60_000, "background": True, "stream": True}
        for _ in range(8):
            connection = clients.enter_context(unread(gate, body, PATH))
            gate.serve("x" * 20_000)
            gate.closed()
            response_id = json.loads(
                read_until(connection, b"response.in_progress").split(b"data: ")[1].split(b"\n\n")[0]
            )["response"]["id"]
            assert gate.client.delete(f"{PATH}/{response_id}").status_code == 200
            if load(gate)["open_bytes"] > MAX_BYTES * 3 // 4:
                break
        submit, reply = until_admitted(gate, LARGE)
        gate.finish(submit)
        assert reply.result().status_code == 200


@pytest.mark.parametrize("num_credits", [0, 1000])
def test_over_zeromq(gate: Gate, num_credits: int) -> None:
    """Whether the client grants no credit, or its connection takes nothing."""
    with RawPeer(gate, receive_bound=1) as peer:
        for number in range(1, 20):
            peer.generate(number, num_credits=num_credits, max_tokens=180, logprobs=20)
            submit = gate.begin()
            grow(gate, submit, 20, m.Finish.LENGTH)
            gate.closed()
            if load(gate)["open_bytes"] > MAX_BYTES * 3 // 4:
                break
        else:
            raise AssertionError("there was room for all, so the test proves nothing")
        submit, reply = until_admitted(gate, LARGE)
        gate.finish(submit)
        assert reply.result().status_code == 200
        failures = []
        while not failures:
            message = peer.receive()
            failures = [message.failure] if isinstance(message, p.Failed) else []
        assert (failures[0].status, failures[0].code) == (408, "stalled")
        assert "slower than" in failures[0].message


def test_they_are_counted_and_logged(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    with ExitStack() as clients:
        fill(gate, clients)
        submit, reply = until_admitted(gate, LARGE)
        gate.finish(submit)
        assert reply.result().status_code == 200
    assert counts_of(gate).num_given_up >= 1
    assert "gave up replies that clients took too slowly" in caplog.text


def test_results_that_connections_over_zeromq_have_not_sent_are_counted_and_bounded(tmp_path: Path) -> None:
    """A request is over when its connection has its last message, however large: vectors of a long text."""
    address, max_bytes, num_tokens = f"tcp://127.0.0.1:{free_port()}", 2**26, 200_000
    size = num_tokens * EMBEDDER.width * 4
    with (
        Gate(tmp_path, pooler=EMBEDDER, max_open_bytes=max_bytes, zmq=address) as gate,
        ExitStack() as clients,
    ):
        for number in range(8):
            peer = clients.enter_context(TcpPeer(address))
            peer.send(p.Hello(2, 2, "a test"))
            peer.send(generate(1, task="token_embed"))
            give(gate, gate.begin(), [1.0] * (num_tokens * EMBEDDER.width))
            until(gate, lambda found: found["open_sequences"] == 0)
            found = load(gate)["open_bytes"]
            assert min(number + 1, 4) * size // 4 < found <= max_bytes // 4 + size
