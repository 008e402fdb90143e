"""Each reply ends where HTTP says that it ends, whatever was sent: each route, method and form of a request, over raw
connections that are kept, with a strict reader. New routes are covered because the table of routes is walked.

`make test` sends some forms of each route and method, PIPELINE_ALL_CASES=1 all.
"""

import asyncio
import contextlib
import itertools
import json
import os
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import httpx
import pytest

from pipeline.config.settings import GatewaySettings
from pipeline.deploy.health_checks import FixedReplicas
from pipeline.deploy.ingress import Ingress, IngressSettings
from pipeline.stages.gateway.http.routes import ROUTES
from pipeline.stages.gateway.page import files
from tests.e2e.server import Server
from tests.http_server.accepted import all_accepted
from tools.fuzzing.replies import FramingError, Reply, ReplyReader

ALL = bool(os.environ.get("PIPELINE_ALL_CASES"))
NUM_PARTS = 8 if ALL else 1
"""Of the paths, each a test of its own: all of them take minutes, and many more beside other tests."""
PATIENCE_S = 30.0
METHODS = ("HEAD", "GET", "OPTIONS", "POST", "PUT", "DELETE", "PATCH", "TRACE", "CONNECT", "PROPFIND", "QUERY", "FOO")
QUERIES = ("", "?stream=true", "?stream=true&starting_after=0")
NO_ROUTES = ("/nothing", "/v1/nothing", "/v1/messages/nothing", "/api/nothing", "/page/../x", "*")
CHUNKED = b"Transfer-Encoding: chunked\r\n"
LENGTH = b"Content-Type: application/json\r\nContent-Length: %d\r\n"


T = TypeVar("T")


class Form(NamedTuple):
    """How a request is written: its version, further headers, how its body is sent, and whether the client waits for
    100 Continue before it sends the body."""

    version: bytes = b"1.1"
    headers: bytes = b""
    body: str = "none"
    """none, length, chunks or torn"""
    waits: bool = False


FORMS = {
    "plain": Form(),
    "with a body": Form(body="length"),
    "with chunks": Form(body="chunks"),
    "with a body that is closed": Form(headers=b"Connection: close\r\n", body="length"),
    "closed": Form(headers=b"Connection: close\r\n"),
    "HTTP/1.0": Form(version=b"1.0"),
    "HTTP/1.0 with a body": Form(version=b"1.0", body="length"),
    "HTTP/1.0 kept": Form(version=b"1.0", headers=b"Connection: keep-alive\r\n"),
    "HTTP/1.0 kept with a body": Form(version=b"1.0", headers=b"Connection: keep-alive\r\n", body="length"),
    "HTTP/1.0 with chunks": Form(version=b"1.0", body="chunks"),
    "waits for 100": Form(headers=b"Expect: 100-continue\r\n", body="length", waits=True),
    "waits for 100, with chunks": Form(headers=b"Expect: 100-continue\r\n", body="chunks", waits=True),
    "does not wait for 100": Form(headers=b"Expect: 100-continue\r\n", body="length"),
    "expects 100 of no body": Form(headers=b"Expect: 100-continue\r\n"),
    "expects tea": Form(headers=b"Expect: tea\r\n", body="length", waits=True),
    "HTTP/1.0 expects 100": Form(version=b"1.0", headers=b"Expect: 100-continue\r\n", body="length"),
    "asks for websockets": Form(
        headers=b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: YQ==\r\n"
    ),
    "asks for websockets, with a body": Form(headers=b"Connection: Upgrade\r\nUpgrade: websocket\r\n", body="length"),
    "asks for HTTP/2": Form(headers=b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"),
    "with a length and chunks": Form(headers=b"Content-Length: 2\r\n", body="chunks"),
    "with two lengths": Form(headers=b"Content-Length: 2\r\n", body="length"),
    "with an unknown coding": Form(headers=b"Transfer-Encoding: gzip\r\n"),
    "with two codings": Form(headers=b"Transfer-Encoding: chunked\r\n", body="chunks"),
    "with torn chunks": Form(body="torn"),
    "with a wrong type": Form(headers=b"Content-Type: text/plain\r\n", body="chunks"),
    "with a wrong encoding": Form(headers=b"Content-Encoding: br\r\n", body="length"),
    "with a wrong gzip": Form(headers=b"Content-Encoding: gzip\r\n", body="length"),
    "with an id": Form(headers=b"X-Request-Id: a-1\r\n"),
    "with an id that splits": Form(headers=b"X-Request-Id: a\rX-B: 1\r\n"),
    "of another site": Form(headers=b"Origin: http://evil.example\r\n"),
    "of two hosts": Form(headers=b"Host: evil.example\r\n"),
}  # fmt: skip


class Target(NamedTuple):
    address: tuple[str, int]
    sentinel: str
    """A path whose GET is answered with 200."""


class Wire:
    """A connection: sends a request and checks that its reply, and the reply to another request behind it, are all that
    arrives."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._numbers = itertools.count()
        self._open()

    def _open(self) -> None:
        self._socket = socket.create_connection(self._target.address, timeout=PATIENCE_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = ReplyReader()

    def close(self) -> None:
        self._socket.close()

    def check(self, method: str, path: str, form: Form, body: bytes) -> Reply:
        """Returns the reply. Raises FramingError."""
        head = f"{method} {path} ".encode() + b"HTTP/%b\r\nHost: localhost\r\n%b" % (form.version, form.headers)
        sent = b""
        match form.body:
            case "length":
                head, sent = head + LENGTH % len(body), body
            case "chunks":
                head, sent = head + CHUNKED, b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
            case "torn":
                head, sent = head + CHUNKED, b"zz\r\n" + body
        mark = f"sentinel-{next(self._numbers)}"
        sentinel = f"GET {self._target.sentinel} HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: {mark}\r\n\r\n".encode()
        self._reader.expect(method)
        ends = b"close" in form.headers or (form.version == b"1.0" and b"keep-alive" not in form.headers)
        self._send(head + b"\r\n" if form.waits else head + b"\r\n" + sent)
        is_pipelined = not form.waits and not ends and b"Upgrade" not in form.headers
        if is_pipelined:
            self._send(sentinel)
        reply = self._read(sent if form.waits else b"")
        if reply.closes or ends:
            if not reply.closes:
                raise FramingError(f"kept, though the client closes: {reply}")
            self._until_end()
            self._open()
            return reply
        if form.waits and not reply.num_interim:
            raise FramingError(f"the client has not sent its body, and the connection is kept: {reply}")
        if not is_pipelined:
            self._send(sentinel)
        self._reader.expect("GET")
        second = self._read()
        if second.status != 200 or second.headers.get("x-request-id") != mark:
            raise FramingError(f"another reply than that of the next request: {second}")
        if not self._reader.is_at_start:
            raise FramingError("bytes behind the replies")
        return reply

    def _send(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the reply says why
            self._socket.sendall(data)

    def _read(self, on_interim: bytes = b"") -> Reply:
        """The next reply; `on_interim` is sent at 100 Continue."""
        replies = self._reader.feed(b"")
        while not replies:
            data = self._socket.recv(1 << 16)
            if data.startswith(b"HTTP/1.1 100 ") and on_interim:
                self._send(on_interim)
                on_interim = b""
            replies = self._reader.feed(data) if data else self._reader.end()
            if not data and not replies:
                raise FramingError("the connection ended without a reply")
        (reply,) = replies
        return reply

    def _until_end(self) -> None:
        """The server closes as soon as the client does. It may wait for the rest of a body before."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
            rest = b"".join(iter(lambda: self._socket.recv(1 << 16), b""))
        except TimeoutError:
            raise FramingError("the connection stays open") from None
        except OSError:
            rest = b""  # it had not read all that was sent
        self._socket.close()
        if rest:
            raise FramingError(f"bytes behind the last reply: {rest[:200]!r}")


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    with Server(*settings(tiny_model)) as server:
        yield server


def settings(model: Path) -> tuple[str, ...]:
    own = (f"model={model}", f"cache_dir={model.parent / 'cache'}", "max_model_len=64")
    return *own, "execute.num_threads=1", "execute.kv_cache_bytes=16MiB"


def address_of(url: str) -> tuple[str, int]:
    parts = httpx.URL(url)
    assert parts.port is not None
    return parts.host, parts.port


@pytest.fixture(scope="module")
def gateway(server: Server) -> Target:
    return Target(address_of(server.url), "/version")


@pytest.fixture(scope="module")
def bodies(server: Server) -> dict[str, bytes]:
    """By path, a small body that the route accepts, for each that has one."""
    paths = httpx.get(f"{server.url}/openapi.json", timeout=PATIENCE_S).json()["paths"]
    found = {}
    for path, operations in paths.items():
        content = operations.get("post", {}).get("requestBody", {}).get("content", {})
        example = content.get("application/json", {}).get("example")
        found[path] = json.dumps(small(example or {})).encode()
    return found


def small(body: Any) -> Any:
    """A body that asks for few tokens."""
    counts = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict", "num_predict")
    return {
        name: small(value) if isinstance(value, dict) else 2 if name in counts else value
        for name, value in body.items()
    }


@pytest.fixture(scope="module")
def response_id(server: Server) -> str:
    """Of a stored response whose events can be read again."""
    body = {"model": "tiny", "input": "Hi", "max_output_tokens": 2, "background": True, "stream": True}
    text = httpx.post(f"{server.url}/v1/responses", json=body, timeout=PATIENCE_S).text
    return str(json.loads(text.partition("data: ")[2].partition("\n")[0])["response"]["id"])


def walk(target: Target, paths: list[tuple[str, bytes]], number: int = 0) -> None:
    """Send all forms with each method and query to each path, or a plain one and some that differ from path to path."""
    wire = Wire(target)
    problems = []
    names = itertools.cycle(FORMS)
    for _ in range(number):
        next(names)
    for row, (path, body) in enumerate(paths):
        streamed = json.dumps(json.loads(body) | {"stream": True}).encode() if body != b"{}" else body
        for column, method in enumerate(METHODS):
            queries = QUERIES if method in ("GET", "POST") else [QUERIES[(row + column) % len(QUERIES)]]
            some = [("", "plain"), *((query, next(names)) for query in queries)]
            for query, name in itertools.product(QUERIES, FORMS) if ALL else some:
                try:
                    wire.check(method, path + query, FORMS[name], streamed if query else body)
                except (FramingError, TimeoutError, ConnectionError) as error:
                    problems.append(f"{method} {path}{query}, {name}: {error!r}")
                    wire.close()
                    wire = Wire(target)
                    assert len(problems) < 20, "\n".join(problems)
    wire.close()
    assert not problems, "\n".join(problems)


def paths_of(bodies: dict[str, bytes], response_id: str, *, is_admin: bool | None = None) -> list[tuple[str, bytes]]:
    paths = {}
    for route in ROUTES:
        if is_admin is None or route.is_admin == is_admin:
            path = route.path.replace("{model}", "tiny").replace("{response_id}", response_id)
            paths[path] = bodies.get(route.path, b"{}")
    return list(paths.items())


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_replies_of_the_gateway(server: Server, gateway: Target, bodies: dict[str, bytes], part: int) -> None:
    others = [*NO_ROUTES, *list(files.paths())[:2]]
    paths = [*paths_of(bodies, "resp_unknown"), *((path, b"{}") for path in others)]
    walk(gateway, paths[part::NUM_PARTS])
    server.until_idle()
    assert "Traceback" not in server.log()


def test_replies_of_a_stored_response(gateway: Target, response_id: str) -> None:
    """Without DELETE, which ends it."""
    wire = Wire(gateway)
    for method, query, form in itertools.product(("HEAD", "GET", "POST", "OPTIONS"), QUERIES, FORMS.values()):
        for path in (f"/v1/responses/{response_id}", f"/v1/responses/{response_id}/input_items"):
            wire.check(method, path + query, form, b"{}")
    wire.close()


def test_replies_of_the_admin_listener(tiny_model: Path) -> None:
    with Server(*settings(tiny_model), "gateway.admin_port=0") as server:
        line = server.wait_for_line("ready on", 1)
        admin = Target(address_of(line.partition("admin=")[2].split()[0]), "/live")
        walk(admin, [*paths_of({}, "x", is_admin=True), ("/nothing", b"{}")])


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_replies_of_the_ingress(ingress: Target, bodies: dict[str, bytes], response_id: str, part: int) -> None:
    paths = [*paths_of(bodies, response_id), *((path, b"{}") for path in NO_ROUTES)]
    walk(ingress, paths[part::NUM_PARTS], 3)


def test_the_reader_is_strict() -> None:
    """It refuses each of these."""
    ok = "HTTP/1.1 200 OK\r\nDate: x\r\nServer: pipeline\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\nab"
    reader = ReplyReader()
    reader.expect("GET")
    assert reader.feed(ok.encode())[0].body == b"ab" and reader.is_at_start
    chunked = ok.partition("Content-Length")[0] + "Transfer-Encoding: chunked\r\n\r\n"
    wrong = {
        "a body behind HEAD": ("HEAD", ok),
        "bytes behind": ("GET", ok + "c"),
        "two lengths": ("GET", ok.replace("Date: x", "Content-Length: 2")),
        "a length and chunks": ("GET", ok.replace("Date: x", "Date: x\r\nTransfer-Encoding: chunked")),
        "no end": ("GET", ok.replace("Content-Length: 2", "X-A: 1")),
        "a split header": ("GET", ok.replace("Date: x", "Date: x\nX-A: 1")),
        "another server": ("GET", ok.replace("pipeline", "Python/3.11 aiohttp/3.14")),
        "no Allow": ("GET", ok.replace("200 OK", "405 No")),
        "a length of 204": ("GET", ok.replace("200 OK", "204 OK")),
        "chunks of HTTP/1.0": ("GET", chunked.replace("HTTP/1.1", "HTTP/1.0")),
        "a chunk that is longer": ("GET", chunked + "1\r\nab\r\n0\r\n\r\n"),
        "a size that is no number": ("GET", chunked + "zz\r\n"),
    }
    for method, data in wrong.values():
        reader = ReplyReader()
        reader.expect(method)
        with pytest.raises(FramingError):
            reader.feed(data.encode())
            reader.expect("GET")
            reader.feed(b"")


@pytest.fixture(scope="module")
def ingress(gateway: Target) -> Iterator[Target]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(PATIENCE_S)

    async def start() -> Ingress:
        fixed = FixedReplicas([gateway.address], probe_s=0.5)
        ingress = Ingress(fixed, IngressSettings(gateway=GatewaySettings(port=0)))
        await ingress.start()
        await fixed.start(PATIENCE_S)
        return ingress

    async def until(is_quiet: Callable[[], bool]) -> None:
        """Wait for some turns of the loop in a row in which it is."""
        num_quiet = 0
        async with asyncio.timeout(PATIENCE_S):
            while num_quiet < 5:
                num_quiet = num_quiet + 1 if is_quiet() else 0
                await asyncio.sleep(0.01)

    def is_closed() -> bool:
        # A transport that does not read, and has nothing to write, is not in the selector.
        transports = list(loop._transports.values())  # type: ignore[attr-defined]
        is_open = any(one._sock is not None for one in transports)
        return not is_open and len(loop._selector.get_map()) <= 1 and len(asyncio.all_tasks()) == 1  # type: ignore[attr-defined]

    async def close(ingress: Ingress) -> None:
        await all_accepted()
        await ingress.close()
        await until(is_closed)

    ingress = run(start())
    try:
        yield Target(address_of(ingress.url), "/version")
    finally:
        run(close(ingress))
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE_S)
        loop.close()
