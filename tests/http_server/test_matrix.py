"""Each listener × keys × route × Host × Origin × content type, against what docs/security.md says under Access."""

import asyncio
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from aiohttp import HttpVersion11

from pipeline.http_server.error_responses import REQUEST_ID
from pipeline.stages.gateway.http.routes import ROUTES
from pipeline.stages.gateway.page import files
from tests.http_server.listeners import ALLOWED_ORIGIN, KEY, LISTENERS, Listener, listener

ROOT = Path(__file__).resolve().parents[2]
STATUS = ("/health", "/live", "/metrics", "/ping")
OTHER_PATHS = (
    "/page/../v1/models", "/page/./../v1/models", "/page/%2e%2e/v1/models", "/page/..%2fv1%2fmodels",
    "/page/.%2E/health", "/page/a/../../v1/models", "/page/..;/v1/models", "/page/..\\v1\\models",
    "/page//v1/models", "/page/", "/page/%00", "/page",
    "/PAGE/app.js", "//v1/models", "//health", "/./health",
    "/%68ealth", "/health%2f..%2fv1", "/health;a", "/live/",
    "/metrics/../v1/models",
)  # fmt: skip
"""Paths that begin like an open one, but may name another one if dots, escapes or double slashes are resolved."""
OWN_HOST, FOREIGN_HOST = "127.0.0.1:8000", "attacker.example.com"
HOSTS = (OWN_HOST, FOREIGN_HOST, None)
ORIGINS = (None, f"http://{OWN_HOST}", ALLOWED_ORIGIN, "https://attacker.example.com")
JSON, FORM, PLAIN = "application/json", "application/x-www-form-urlencoded", "text/plain"
KEYS: dict[str, dict[str, str]] = {
    "none": {},
    "wrong": {"Authorization": f"Bearer {KEY}x"},
    "right": {"Authorization": f"Bearer {KEY}"},
    "x-api-key": {"x-api-key": KEY},
    "wrong before right": {"Authorization": "Bearer x", "x-api-key": KEY},
}
RIGHT = ("right", "x-api-key")


_SERVER = re.compile(
    r"\b(AppRunner|ServerRunner|SockSite|TCPSite|UnixSite|run_app|web\.Server|HTTPServer|http\.server)\b"
)


class Request(NamedTuple):
    method: str
    path: str
    key: str
    host: str | None
    origin: str | None
    kind: str | None


class Headers(dict[str, str]):
    """As far as the rules use aiohttp's headers, whose names have no case."""

    def getall(self, name: str, default: list[str]) -> list[str]:
        return [self[name]] if name in self else default


class Fake(dict[Any, Any]):
    """What the rules read of a request."""

    def __init__(self, request: Request) -> None:
        super().__init__()
        pairs = {"Host": request.host, "Origin": request.origin, "Content-Type": request.kind} | KEYS[request.key]
        self.headers = Headers({name: value for name, value in pairs.items() if value is not None})
        self.method, self.raw_path, self.version = request.method, request.path, HttpVersion11
        self.rel_url = _url(request.path)


_urls: dict[str, Any] = {}


def _url(path: str) -> Any:
    """Only its `raw_path` is used."""
    return _urls.setdefault(path, SimpleNamespace(raw_path=path))


def routes() -> Iterator[tuple[str, str]]:
    """The rows of the routes table, HEAD where there is GET, the page's files, and paths that are no route."""
    for route in ROUTES:
        path = route.path.replace("{model}", "tiny").replace("{response_id}", "resp_1")
        yield route.method, path
        if route.method == "GET":
            yield "HEAD", path
    yield from (("GET", path) for path in files.paths())
    yield from (("GET", path) for path in OTHER_PATHS)
    yield from (("GET", "/nothing"), ("POST", "/nothing"), ("POST", "/health"), ("GET", "/health/"), ("POST", "/"))


def requests() -> Iterator[Request]:
    for method, path in routes():
        kinds = (JSON, FORM, PLAIN, None) if method == "POST" else (None,)
        for key, host, origin, kind in itertools.product(KEYS, HOSTS, ORIGINS, kinds):
            yield Request(method, path, key, host, origin, kind)


def expected(one: Listener, request: Request) -> int:
    """The status that docs/security.md promises; 299 reaches the routes."""
    is_json = request.method != "POST" or request.kind in (JSON, None)
    if request.kind == FORM and request.path.startswith("/api/") and request.origin is None:
        is_json = True  # `curl -d` in Ollama's examples
    if one.has_keys:
        is_page = request.path in files.paths()
        is_open = request.method in ("GET", "HEAD") and (is_page or (one.has_status and request.path in STATUS))
        if request.key not in RIGHT and not is_open:
            return 401
    elif request.host != OWN_HOST or request.origin == ORIGINS[-1]:
        return 403
    return 299 if is_json else 415


def status_of(one: Listener, request: Request) -> int:
    """Run the rules; they wait for nothing, least of all for the body."""
    fake = Fake(request)
    assert REQUEST_ID not in fake
    try:
        one.handle(fake).send(None)  # type: ignore[attr-defined]
    except StopIteration as end:
        return int(end.value.status)
    raise AssertionError("the rules waited for something")


@pytest.mark.parametrize("keys", [False, True], ids=["no keys", "keys"])
@pytest.mark.parametrize("name", LISTENERS)
async def test_each_request_gets_what_the_rules_say(
    name: str, keys: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with listener(name, tmp_path, monkeypatch, keys=keys) as one:
        wrong = [
            (request, status, due)
            for request in requests()
            if (status := status_of(one, request)) != (due := expected(one, request))
        ]
        assert not wrong, f"{len(wrong)} are wrong, such as {wrong[:5]}"


@pytest.mark.parametrize("keys", [False, True], ids=["no keys", "keys"])
@pytest.mark.parametrize("name", LISTENERS)
async def test_a_page_of_another_site_is_refused_at_the_socket_before_its_body(
    name: str, keys: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over TCP, with a body that never comes: the answer comes without it."""
    async with listener(name, tmp_path, monkeypatch, keys=keys) as one:

        async def send(method: str, path: str) -> None:
            request = Request(method, path, "wrong", FOREIGN_HOST, ORIGINS[-1], PLAIN)
            status = expected(one, request)
            if status not in (401, 403):
                return  # an open path
            reader, writer = await asyncio.open_connection(*one.address)
            head = f"{method} {path} HTTP/1.1\r\nHost: {FOREIGN_HOST}\r\nOrigin: {ORIGINS[-1]}\r\nContent-Type: {PLAIN}"
            writer.write(f"{head}\r\nAuthorization: Bearer x\r\nContent-Length: 4000000\r\n\r\n".encode())
            got = await asyncio.wait_for(reader.readline(), 30.0)
            assert got.split()[1] == str(status).encode(), (method, path, got)
            writer.close()

        await asyncio.gather(*(send(method, path) for method, path in routes()))


def test_only_the_listener_accepts_http() -> None:
    """A server made elsewhere would have no rules."""
    found = [
        str(path.relative_to(ROOT))
        for folder in ("pipeline", "stages")
        for path in (ROOT / folder).rglob("*.py")
        if _SERVER.search(path.read_text())
    ]
    assert found == ["pipeline/http_server/listener.py"]
