"""Which headers pass through an ingress, in both directions, and what a replica may answer."""

import asyncio
import gzip
import json

import pytest

from pipeline.deploy.proxy import relayed_request
from pipeline.deploy.proxy.forwarding import end_to_end
from pipeline.deploy.proxy.resumable_stream import MAX_HELD_BYTES, ResumableStream
from pipeline.deploy.proxy.upstream import MAX_HEAD_BYTES, MAX_TRAILER_BYTES
from pipeline.runtime.resume_points import RESUMABLE, RESUME
from tests.deploy.fake_replica import PATIENCE_S, FakeReplica, deployed, text_of
from tests.deploy.proxy.streams import BODY, tokens_of
from tests.deploy.proxy.test_upstream import answer


@pytest.mark.parametrize("name", [RESUMABLE, RESUMABLE.lower(), RESUMABLE.upper(), "x-PIPELINE-resumable"])
async def test_a_client_that_asks_for_points_gets_them_whatever_the_case_of_the_header(name: str):
    async with (
        deployed(FakeReplica()) as (_, client),
        client.post("/v1/completions", json=BODY, headers={name: "1"}) as response,
    ):
        assert (await response.text()).count(": point 0 ") == 20
        assert response.headers[RESUMABLE] == "1"


@pytest.mark.parametrize("name", [RESUME, RESUME.lower(), RESUME.upper()])
async def test_points_that_a_client_sends_reach_the_replica_whatever_the_case_of_the_header(name: str):
    replica = FakeReplica()
    points = b": point {}\n"
    headers = {name: str(len(points)), "Content-Type": "application/json"}
    async with deployed(replica) as (_, client):
        data = points + json.dumps(BODY).encode()
        async with client.post("/v1/completions", data=data, headers=headers) as response:
            assert tokens_of(await response.text()) == list(range(20))
    _, seen, body = replica.seen[0]
    assert body.startswith(points) and seen[RESUME.lower()] == headers[name] and RESUMABLE.lower() not in seen


async def test_headers_of_one_connection_stay_on_it():
    replica = FakeReplica()
    headers = {
        "connection": "keep-alive, X-Private", "x-private": "1", "Keep-Alive": "5", "Upgrade": "h2c", "TE": "trailers",
        "Proxy-Authorization": "secret", "Accept-Encoding": "gzip, br", "X-Other": "stays",
    }  # fmt: skip
    async with deployed(replica) as (_, client):
        body = gzip.compress(json.dumps({"prompt": "x"}).encode())
        own = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        async with client.post("/v1/completions", data=body, headers=headers | own) as response:
            assert (await response.json())["text"] == text_of(20)
    first, seen, got = replica.seen[0]
    assert first == "POST /v1/completions HTTP/1.1" and json.loads(got) == {"prompt": "x"}
    assert sorted(set(seen) - {"accept", "user-agent", RESUMABLE.lower()}) == [
        "content-length", "content-type", "host", "x-other",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("target", "passed"),
    [
        (b"/v1/models?next=http://a/b", "/v1/models?next=http://a/b"),
        (b"http://localhost/v1/models?a=%20b", "/v1/models?a=%20b"),
        (b"/v1//models/../x", "/v1//models/../x"),
    ],
)
async def test_the_target_reaches_a_replica_without_its_host(target: bytes, passed: str):
    replica = FakeReplica()
    async with deployed(replica) as (ingress, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(ingress.url.rsplit(":")[-1]))
        writer.write(b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % target)
        assert (await asyncio.wait_for(reader.readline(), PATIENCE_S)).startswith(b"HTTP/1.1 200")
        writer.close()
    assert replica.seen[0][0] == f"GET {passed} HTTP/1.1"


def test_connection_names_further_headers():
    pairs = [("CONNECTION", "X-A , x-b"), ("x-a", "1"), ("X-B", "2"), ("X-C", "3"), ("transfer-ENCODING", "chunked")]
    assert end_to_end(pairs) == [("X-C", "3")]


class Raw(FakeReplica):
    """Answers everything but /health with these bytes, and ends the connection."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self.data = data

    def _reply(self, writer, status, answer):
        if answer is self.health[1]:
            super()._reply(writer, status, answer)
        else:
            writer.write(self.data)
            writer.close()


async def test_a_compressed_reply_is_passed_on_as_it_is():
    body = gzip.compress(b'{"a": 1}')
    extra = f"Content-Encoding: gzip\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    replica = Raw(f"HTTP/1.1 200 OK\r\n{extra}\r\n\r\n".encode() + body)
    async with deployed(replica) as (_, client), client.get("/v1/models") as response:
        assert response.headers["Content-Encoding"] == "gzip" and await response.json() == {"a": 1}


async def test_head_has_the_headers_of_get_and_no_body():
    for kind in ("application/json", "text/event-stream"):
        replica = Raw(f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: 5\r\n\r\n".encode())
        async with deployed(replica) as (ingress, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(ingress.url.rsplit(":")[-1]))
            writer.write(b"HEAD /v1/responses/a?stream=true HTTP/1.1\r\nHost: localhost\r\n\r\n")
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
            assert head.startswith(b"HTTP/1.1 200") and kind.encode() in head
            writer.write(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await asyncio.wait_for(reader.readline(), PATIENCE_S)).startswith(b"HTTP/1.1 200")
            writer.close()


LONG = json.dumps({"text": "x" * 1_000_000}).encode()


async def test_a_long_reply_is_passed_on_and_not_collected(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(relayed_request, "MAX_REPLY_BYTES", 10_000)
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(LONG)}\r\n\r\n".encode()
    body = {"prompt": "x"}
    async with deployed(Raw(head + LONG)) as (_, client), client.post("/v1/completions", json=body) as response:
        assert await response.read() == LONG and response.headers["Content-Length"] == str(len(LONG))
    async with deployed(Raw(head + LONG[:-1000])) as (ingress, client):  # its end never comes
        with pytest.raises(Exception, match=r"[Pp]ayload|disconnect|reset"):
            async with client.post("/v1/completions", json={"prompt": "x"}) as response:
                await response.read()
        assert ingress.relay.counts.num_broken == 1


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: +5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1_0\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello!!0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: y\r\n" * (MAX_TRAILER_BYTES // 5),
        b"HTTP/1.1 200 OK\r\nX-A: a\nX-B: b\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX A: a\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * MAX_HEAD_BYTES + b"\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 5000,
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
    ],
)
def test_a_response_that_is_not_exactly_http_ends_the_connection(data: bytes):
    _, connection, error = answer(data, [])
    assert error is not None and not connection.is_reusable


def test_a_response_that_is_longer_than_it_says_ends_the_connection():
    sink, connection, error = answer(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhelloHTTP/1.1 200 OK", [])
    assert error is None and sink.body == b"hello" and not connection.is_reusable


def test_a_stream_without_points_is_not_held_back_for_ever():
    stream = ResumableStream()
    event = b"data: " + b"x" * 100_000 + b"\n\n"
    num_held = 0
    for _ in range(2 * MAX_HELD_BYTES // len(event)):
        num_held += len(event) - len(stream.feed(event))
        assert num_held <= MAX_HELD_BYTES + len(event)
    assert not stream.is_resumable
