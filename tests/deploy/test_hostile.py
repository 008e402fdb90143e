"""What clients without a key, slow clients and large bodies cost an ingress."""

import asyncio
import contextlib
import gzip
import json
import socket
import tracemalloc
from typing import Any

import pytest

from pipeline.deploy.ingress import Ingress
from pipeline.deploy.proxy import relay
from pipeline.http_server import listener
from pipeline.http_server.bodies import body_reader, upload_budget
from pipeline.http_server.bodies.body_reader import BodyReader
from pipeline.http_server.bodies.large_body_lock import LARGE_BYTES
from pipeline.http_server.bodies.upload_budget import NUM_BODIES
from pipeline.http_server.sockets.connections import HttpConnections
from pipeline.runtime.queues.fair_gate import FairGate
from pipeline.runtime.security.api_keys import Keys
from tests.deploy.fake_replica import PATIENCE_S, FakeReplica, deployed
from tests.deploy.proxy.streams import BODY, tokens_of

KEY = "sk-the-key-of-the-ingress"
RIGHT = {"Authorization": f"Bearer {KEY}"}
INFLATED_BYTES = 64 * 1024**2
BOMB = gzip.compress(b"[" * INFLATED_BYTES, 9)
"""62 kB, 1000 times as much when it is inflated."""
LARGE = 2 * LARGE_BYTES
PEAK_BYTES = 24 * 1024**2
"""Of the whole process: a body of 4 MiB, copied once, and what else there is."""


async def raw(ingress: Ingress, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that has sent `data`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(ingress.url.rsplit(":")[-1]))
    writer.write(data)
    return reader, writer


async def answer(ingress: Ingress, data: bytes) -> int:
    """The status of the response to `data`, which need not be a whole request."""
    reader, writer = await raw(ingress, data)
    try:
        return await status_of(reader)
    finally:
        writer.close()


async def status_of(reader: asyncio.StreamReader) -> int:
    return int((await asyncio.wait_for(reader.readline(), PATIENCE_S)).split()[1])


def head(num_bytes: int, path: str = "/v1/completions", *, key: str = "", more: str = "") -> bytes:
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{authorization}{more}Content-Type: application/json\r\n"
        f"Content-Length: {num_bytes}\r\n\r\n"
    ).encode()


@pytest.mark.parametrize(("key", "status"), [("", 401), ("wrong", 401), (KEY, 413)])
@pytest.mark.parametrize("path", ["/v1/completions", "/abort_requests"])
async def test_a_body_that_inflates_a_thousandfold_costs_no_more_than_the_limit(key: str, status: int, path: str):
    replica = FakeReplica()
    async with deployed(replica, keys=Keys.of([KEY])) as (ingress, _):
        tracemalloc.start()
        try:
            reader, writer = await raw(
                ingress, head(len(BOMB), path, key=key, more="Content-Encoding: gzip\r\n") + BOMB
            )
            assert await status_of(reader) == status
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        writer.close()
        assert peak < PEAK_BYTES and not replica.seen and not ingress._bodies._uploads.num_bytes


@pytest.mark.parametrize("key", ["", "wrong"])
async def test_no_byte_of_a_body_is_read_without_a_key(key: str, monkeypatch: pytest.MonkeyPatch):
    read: list[int] = []

    async def reading(self: BodyReader, *args: Any) -> Any:
        read.append(1)

    monkeypatch.setattr(BodyReader, "parse", reading)
    async with deployed(FakeReplica(), keys=Keys.of([KEY])) as (ingress, client):
        for path in ("/v1/completions", "/abort_requests", "/reset_prefix_cache", "/v1/load_lora_adapter", "/health"):
            assert await answer(ingress, head(4_000_000, path, key=key)) == 401
            assert await answer(ingress, head(4_000_000, path, key=key, more="Expect: 100-continue\r\n")) == 401
        for path in ("/health", "/live", "/metrics", "/"):
            async with client.get(path, data=b"x" * 100) as response:
                assert response.status != 401
        assert not read and not ingress._bodies._uploads.num_bytes


async def test_with_a_key_the_request_reaches_a_replica_which_checks_it_again():
    replica = FakeReplica()
    async with deployed(replica, keys=Keys.of([KEY])) as (_, client):
        async with client.post("/v1/completions", json=BODY, headers=RIGHT) as response:
            assert tokens_of(await response.text()) == list(range(20))
        assert replica.seen[0][1]["authorization"] == RIGHT["Authorization"]


async def test_a_declared_length_over_the_limit_is_refused_before_the_body():
    limits = {"max_body_bytes": 10_000, "max_media_body_bytes": 100_000}
    async with deployed(FakeReplica(), gateway=limits) as (ingress, client):
        for more in ("", "Expect: 100-continue\r\n"):
            assert await answer(ingress, head(100_001, more=more)) == 413
        for letter, status in (("u", 200), ("-", 413)):  # the first could be an image
            body = json.dumps(BODY | {"user": letter * 90_000})
            headers = {"Content-Type": "application/json"}
            async with client.post("/v1/completions", data=body, headers=headers) as response:
                assert response.status == status


async def test_idle_uploads_hold_no_more_than_their_budget(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(upload_budget, "GRACE_S", PATIENCE_S)  # no body is slow
    most = 128 * 1024
    async with deployed(FakeReplica(), gateway={"max_body_bytes": most}) as (ingress, client):
        opened = [await raw(ingress, head(most) + b" " * (most - 1)) for _ in range(NUM_BODIES + 4)]
        refused = [asyncio.create_task(status_of(reader)) for reader, _ in opened]
        while sum(task.done() for task in refused) < 4:
            await asyncio.sleep(0.01)
        assert {task.result() for task in refused if task.done()} == {503}
        assert ingress._bodies._uploads.num_bytes <= NUM_BODIES * most
        async with client.post("/v1/completions", json=BODY) as response:  # small ones have no part in it
            assert response.status == 200
        for task in refused:
            task.cancel()
        for _, writer in opened:
            writer.close()
        async with asyncio.timeout(PATIENCE_S):
            while ingress._bodies._uploads.num_bytes:
                await asyncio.sleep(0.01)


async def test_open_requests_keep_no_more_than_their_budget(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(relay, "NUM_HELD_BODIES", 2)
    monkeypatch.setattr("pipeline.deploy.ingress.NUM_HELD_BODIES", 2)
    replica = FakeReplica()
    replica.hold = asyncio.Event()
    body = json.dumps(BODY | {"user": "u" * 90_000})
    headers = {"Content-Type": "application/json"}
    async with deployed(replica, gateway={"max_body_bytes": 100_000}) as (ingress, client):

        async def post() -> int:
            async with client.post("/v1/completions", data=body, headers=headers) as response:
                await response.read()
                return response.status

        held = [asyncio.create_task(post()) for _ in range(2)]
        while ingress.relay.num_held_bytes < 180_000:
            await asyncio.sleep(0.01)
        assert await post() == 503
        replica.hold.set()
        assert await asyncio.gather(*held) == [200, 200]
        assert ingress.relay.num_held_bytes == 0
        assert await post() == 200


async def test_what_is_sent_to_all_replicas_is_in_the_same_budget():
    """A replica that hangs has ten seconds, in which one client could send gigabytes."""
    replica = FakeReplica()
    replica.hold = asyncio.Event()
    body = json.dumps({"request_ids": ["a" * 99_000]})
    headers = {"Content-Type": "application/json"}
    async with deployed(replica, gateway={"max_body_bytes": 100_000}) as (ingress, client):

        async def post() -> int:
            async with client.post("/abort_requests", data=body, headers=headers) as response:
                await response.read()
                return response.status

        ingress.relay._max_held_bytes = 2 * len(body)
        held = [asyncio.create_task(post()) for _ in range(2)]
        async with asyncio.timeout(PATIENCE_S):
            while ingress.relay.num_held_bytes < 2 * len(body):
                await asyncio.sleep(0.01)
            assert await post() == 503
            replica.hold.set()
            assert await asyncio.gather(*held) == [200, 200]
        assert ingress.relay.num_held_bytes == 0


async def test_slow_headers_and_slow_bodies_end_at_their_deadlines(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(listener, "HEAD_S", 0.2)
    monkeypatch.setattr(body_reader, "BODY_TIMEOUT_S", 0.2)
    async with deployed(FakeReplica()) as (ingress, _):
        reader, writer = await raw(ingress, b"POST /v1/completions HTTP/1.1\r\nHost: local")
        assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
        writer.close()
        assert await answer(ingress, head(100) + b"{") == 408


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-A: " + b"a" * 9000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"X-%d: 1\r\n" % i for i in range(200)) + b"\r\n", 431),
        (
            b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
        ),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n12", 400),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: br\r\nContent-Length: 1\r\n\r\n1", 415),
    ],
)
async def test_what_could_be_read_in_two_ways_or_is_too_long_reaches_no_replica(data: bytes, status: int):
    replica = FakeReplica()
    async with deployed(replica) as (ingress, _):
        assert await answer(ingress, data) == status
        assert not replica.seen


async def test_nesting_deeper_than_the_limit_is_refused():
    async with deployed(FakeReplica()) as (_, client):
        body = b'{"prompt":' + b"[" * 1000 + b"]" * 1000 + b"}"
        async with client.post("/v1/completions", data=body, headers={"Content-Type": "application/json"}) as response:
            assert response.status == 400 and "nested" in await response.text()


async def test_beyond_the_limit_idle_connections_end_and_others_are_refused(monkeypatch: pytest.MonkeyPatch):
    connections = HttpConnections(3, is_strict=True)
    monkeypatch.setattr(Ingress, "_connections", lambda _: connections)
    async with deployed(FakeReplica()) as (ingress, _):
        begun = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
        begun += b"Content-Type: application/json\r\n\r\n{"
        idle, *busy = [await raw(ingress, data) for data in (b"", begun, begun)]
        while sum(not one.is_idle for one in connections._addresses) < 2:
            await asyncio.sleep(0.01)
        busy.append(await raw(ingress, begun))
        assert await asyncio.wait_for(idle[0].read(), PATIENCE_S) == b""
        while sum(not one.is_idle for one in connections._addresses) < 3:
            await asyncio.sleep(0.01)
        refused = await raw(ingress, b"")
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(refused[0].read(), PATIENCE_S) == b""
        for _, writer in (idle, refused, *busy):
            writer.close()


@pytest.mark.parametrize("num_sent", [LARGE, 10])
async def test_a_body_has_no_more_time_than_its_request(num_sent: int, monkeypatch: pytest.MonkeyPatch):
    """It waits for its turn of the parser, or for the rest of it: 60 s each, but for the request's own time."""

    async def endless(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(FairGate, "enter", endless)
    replica = FakeReplica()
    async with deployed(replica, gateway={"request_timeout_s": 0.2}) as (ingress, _):
        for _ in range(NUM_BODIES + 1):  # each returns its room
            reader, writer = await raw(ingress, head(LARGE) + b" " * num_sent)
            answered = await asyncio.wait_for(reader.readuntil(b"}}"), PATIENCE_S)
            writer.close()
            assert answered.startswith(b"HTTP/1.1 504 ") and b'"code":"timeout"' in answered and b"0.2 s" in answered
        assert not replica.seen and not ingress._bodies._uploads.num_bytes


async def test_a_client_that_reads_no_replies_gets_one_at_a_time_and_is_disconnected():
    """A pipeline of small requests would collect replies without end."""
    num = 20_000
    async with deployed(FakeReplica(), gateway={"slow_client_timeout_s": 0.5}) as (ingress, client):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, ("127.0.0.1", int(ingress.url.rsplit(":")[-1])))
        request = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
        sending = asyncio.create_task(loop.sock_sendall(connection, request * num))
        sizes: list[int] = []
        async with asyncio.timeout(PATIENCE_S):
            # Replies are counted for a moment while they are written: wait until one is there for longer.
            while not (sizes and sizes[-5:] == [max(sizes)] * 5):
                await asyncio.sleep(0.01)
                if ingress._unread.num_bytes:
                    sizes.append(ingress._unread.num_bytes)
            while ingress._unread.num_bytes:
                await asyncio.sleep(0.01)
            with contextlib.suppress(ConnectionError):  # the ingress has ended the connection
                await sending
        async with client.get("/metrics") as response:
            size = len(await response.read())
        assert max(sizes) <= 2 * size
        connection.close()


@pytest.mark.parametrize("shares", [False, True])
async def test_a_key_is_routed_by_its_own_prompts_only(shares: bool):
    """What another key has sent is in no cache for it: else a key that sends others' prefixes draws their requests to
    one replica, which computes them anew, and learns from its own ones what others have sent."""
    body = BODY | {"prompt": "a long text " * 400}
    keys, gateway = Keys.of(["sk-of-one", "sk-of-another"]), {"share_prefix_cache": shares}
    replica = FakeReplica()
    async with deployed(replica, FakeReplica(), keys=keys, gateway=gateway) as (ingress, client):

        async def hits_of(key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            async with client.post("/v1/completions", json=body, headers=headers) as response:
                assert tokens_of(await response.text()) == list(range(20))
            return ingress._replicas.routed.router.counts.num_hits

        assert [await hits_of("sk-of-one"), await hits_of("sk-of-one")] == [0, 1]
        assert await hits_of("sk-of-another") == 1 + shares
        assert await hits_of("sk-of-another") == 2 + shares
