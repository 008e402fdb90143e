"""Images of URLs are fetched from a server over TLS, within limits of bytes and time, and without redirects."""

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from yarl import URL

from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.media import fetcher, lookups
from pipeline.stages.gateway.media.fetcher import MediaFetcher
from pipeline.stages.gateway.media.urls import is_public
from pipeline.stages.gateway.parsing.chat.images import LinkedImage
from tests.runtime.security.test_tls import CA, CERT, KEY

DATA = b"\x89PNG" * 1000
MAX_BYTES = 3 * len(DATA)


class Site:
    """A web server with images, at an address that is not public."""

    def __init__(self) -> None:
        self.port = 0
        self.requests: list[web.Request] = []
        self.go_on = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        match request.path:
            case "/redirect":
                raise web.HTTPFound("https://localhost/")
            case "/missing":
                raise web.HTTPNotFound
            case "/compressed":
                return web.Response(body=DATA, headers={"Content-Encoding": "gzip"})
            case "/slow":
                await self.go_on.wait()
            case "/endless":
                response = web.StreamResponse()
                await response.prepare(request)
                while True:
                    await response.write(bytes(1000))
                    await asyncio.sleep(0)  # a client that reads at once never makes it wait
            case "/cut":
                response = web.StreamResponse(headers={"Content-Length": str(2 * len(DATA))})
                await response.prepare(request)
                await response.write(DATA)
                assert request.transport is not None
                request.transport.abort()
                return response
            case "/long":
                response = web.StreamResponse(headers={"Content-Length": str(MAX_BYTES + 1)})
                await response.prepare(request)
                await self.go_on.wait()
            case "/page":
                return web.Response(text="<html>", content_type="text/html")
        return web.Response(body=DATA)

    def image(self, path: str, host: str = "localhost") -> LinkedImage:
        return LinkedImage(data=b"", param="url", url=URL(f"https://{host}:{self.port}{path}"))


@pytest_asyncio.fixture
async def site() -> AsyncIterator[Site]:
    found = Site()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(CERT, KEY)
    server = web.Server(found.handle)  # type: ignore[arg-type] # its types know no base class
    runner = web.ServerRunner(server)
    await runner.setup()
    listener = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await listener.start()
    found.port = runner.addresses[0][1]
    yield found
    found.go_on.set()
    await runner.cleanup()


def fetcher_of(**changes: Any) -> MediaFetcher:
    def look(host: str, port: int) -> list[tuple[int, str]]:
        return [(2, "127.0.0.1")]

    given = {"look": look, "is_allowed": lambda _: True, "tls": ssl.create_default_context(cafile=CA)}
    return MediaFetcher(**{**given, "max_bytes": MAX_BYTES, **changes})


async def error_of(found: MediaFetcher, *images: LinkedImage) -> ApiError:
    with pytest.raises(ApiError) as raised:
        await found.fetch(images, "")
    return raised.value


async def test_images_come_in_order_and_are_asked_for_without_anything_else(site: Site) -> None:
    assert await fetcher_of().fetch([site.image("/a"), site.image("/b")], "") == [DATA, DATA]
    for request in site.requests:
        assert set(request.headers) <= {"Host", "Accept", "Accept-Encoding", "User-Agent", "Connection"}
        assert request.headers["Accept-Encoding"] == "identity"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/redirect", "is a redirect (302), and none are followed"),
        ("/missing", "'localhost' answers 404"),
        ("/compressed", "comes compressed"),
        ("/cut", "could not be fetched from 'localhost'"),
        ("/long", f"is too large: the images of a request that are fetched have {MAX_BYTES} bytes"),
        ("/endless", f"is too large: the images of a request that are fetched have {MAX_BYTES} bytes"),
    ],
)
async def test_other_answers_are_refused(site: Site, path: str, words: str) -> None:
    error = await error_of(fetcher_of(), site.image(path))
    assert (error.status, error.param, error.code) == (400, "url", "invalid_image")
    assert error.message.startswith("the image 'url' ") and words in error.message
    assert len(site.requests) == 1, "a redirect was followed"


async def test_images_of_a_request_have_one_limit_together(site: Site) -> None:
    assert len(await fetcher_of().fetch([site.image("/a")] * 3, "")) == 3
    assert "is too large" in (await error_of(fetcher_of(), *[site.image("/a")] * 4)).message


async def test_what_a_host_calls_its_content_does_not_count(site: Site) -> None:
    """Ingest looks at the first bytes, as with base64."""
    assert await fetcher_of().fetch([site.image("/page")], "") == [b"<html>"]


HOSTILE = {
    "chunks of one byte": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n" * 10_000),
    "interim responses": (b"", b"HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n" * 2_000),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_what_is_dear_for_its_size_does_not_take_the_loop_s_time(name: str) -> None:
    """Eight megabytes of it took the gateway's loop 0.2 s, in turns of 50 ms for each connection."""
    begin, unit = HOSTILE[name]
    over = threading.Event()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(CERT, KEY)

    def send(listener: socket.socket) -> None:
        client, _ = listener.accept()
        with contextlib.suppress(OSError), context.wrap_socket(client, server_side=True) as connection:
            connection.recv(4096)
            connection.sendall(begin + unit * (8 * 1024**2 // len(unit)))
            over.set()
            connection.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=send, args=(listener,))
        thread.start()
        image = LinkedImage(data=b"", param="url", url=URL(f"https://localhost:{listener.getsockname()[1]}/"))
        begin_s = time.thread_time()
        fetching = asyncio.create_task(fetcher_of(max_bytes=8 * 1024**2).fetch([image], ""))
        while not (over.is_set() or fetching.done()):
            await asyncio.wait([fetching], timeout=0.05)
        took_s = time.thread_time() - begin_s
        fetching.cancel()
        await asyncio.wait([fetching])
        thread.join()
    assert over.is_set(), fetching.exception()
    assert took_s < 0.1, took_s


async def test_a_slow_server_has_a_deadline(site: Site) -> None:
    error = await error_of(fetcher_of(timeout_s=0.2), site.image("/a"), site.image("/slow"))
    assert "could not be fetched within 0.2 s" in error.message


async def test_addresses_that_are_not_public_are_not_connected_to(site: Site) -> None:
    error = await error_of(fetcher_of(is_allowed=is_public), site.image("/a"))
    assert "'localhost' has no public address" in error.message and not site.requests
    error = await error_of(MediaFetcher(), site.image("/a"))
    assert "'localhost' has no public address" in error.message and not site.requests


async def test_name_servers_that_do_not_answer_keep_no_one_else_waiting(site: Site) -> None:
    """The loop's own lookups share a few threads, and the process does not end before them."""
    answered = threading.Event()

    def look(host: str, port: int) -> list[tuple[int, str]]:
        if host != "localhost":
            answered.wait()
        return [(2, "127.0.0.1")]

    found = fetcher_of(look=look, timeout_s=0.05)
    slow = [site.image("/a", f"{number}.example") for number in range(lookups.NUM_OF_SCOPE)]
    for image in [*slow, slow[0]]:
        error = await error_of_scope(found, image, "one")
        assert "could not be fetched within" in error.message
    error = await error_of_scope(found, site.image("/a", "more.example"), "one")
    assert error.status == 503 and "name servers" in error.message
    found._timeout_s = 5
    assert await found.fetch([site.image("/a")], "other") == [DATA]
    answered.set()
    while found._lookups._tasks:
        await asyncio.sleep(0.001)  # another thread's loop
    assert await found.fetch([site.image("/a")], "one") == [DATA]
    assert not found._lookups._num_of


async def test_the_certificate_must_be_that_of_the_host(site: Site) -> None:
    for found in (fetcher_of(tls=None), fetcher_of()):
        host = "localhost" if found._tls is None else "other.example"
        assert f"could not be fetched from '{host}'" in (await error_of(found, site.image("/a", host))).message
    assert not site.requests


async def test_one_key_leaves_a_turn_to_others(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    found = fetcher_of()
    slow = [asyncio.create_task(found.fetch([site.image("/slow")], "one")) for _ in range(2 * fetcher.NUM_REQUESTS)]
    assert await found.fetch([site.image("/a")], "other") == [DATA]
    monkeypatch.setattr(fetcher, "WAIT_S", 0.1)
    error = await error_of_scope(found, site.image("/a"), "one")
    assert error.status == 503
    site.go_on.set()
    assert await asyncio.gather(*slow) == [[DATA]] * len(slow)


async def error_of_scope(found: MediaFetcher, image: LinkedImage, scope: str) -> ApiError:
    with pytest.raises(ApiError) as raised:
        await found.fetch([image], scope)
    return raised.value
