"""Fetches the images that clients name by URLs, before their request is opened.

From then on a request with URLs is one with the bytes: they are fetched once, whatever dies later, and a recording has
them (`Received.fetched`).

A thread with a loop of its own fetches: a host may send what costs most for its size, such as chunks of one byte, of
which a read of 256 KiB has tens of thousands.
"""

import asyncio
import functools
import math
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from pipeline.media.limits import LIMITS
from pipeline.runtime.queues.fair_gate import FairGate
from pipeline.stages.gateway.errors import ApiError, invalid, overloaded
from pipeline.stages.gateway.media.lookups import Addresses, Lookups
from pipeline.stages.gateway.media.urls import is_public
from pipeline.stages.gateway.parsing.chat.images import LinkedImage

NUM_REQUESTS = 4
"""Whose images are fetched at a time."""
NUM_CONNECTIONS = 4
"""Of one request."""
TIMEOUT_S = 5.0
"""Of one image, with the name server's answer: vLLM's VLLM_IMAGE_FETCH_TIMEOUT."""
WAIT_S = 30.0
"""Longest time until a request's images are fetched, with the wait for its turn."""
PIECE_BYTES = 64 * 1024


class MediaFetcher:
    """Of one gateway. Requests take turns that are fair to the API keys."""

    def __init__(
        self,
        *,
        timeout_s: float = TIMEOUT_S,
        max_bytes: int = LIMITS.max_bytes,
        look: Callable[[str, int], Addresses] | None = None,
        is_allowed: Callable[[str], bool] = is_public,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`max_bytes` is that of all images of a request together. `look` is as in `Lookups`. `is_allowed` says whether
        an address may be connected to."""
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._lookups, self._is_allowed = Lookups(look), is_allowed
        self._tls = tls
        self._gate = FairGate(NUM_REQUESTS, NUM_REQUESTS - 1)

    @functools.cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        """Of the thread, which starts with the first image and does not keep the process from ending."""
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, name="fetching images", daemon=True).start()
        return loop

    async def _in_thread(self, images: Sequence[LinkedImage], scope: str) -> list[bytes]:
        """`_fetch_all`, to its end, also if this is cancelled: then it is, too."""
        fetching = asyncio.run_coroutine_threadsafe(self._fetch_all(images, scope), self._loop)
        return await asyncio.wrap_future(fetching)

    async def fetch(self, images: Sequence[LinkedImage], scope: str, left_s: float = math.inf) -> list[bytes]:
        """The content of images of one request, in order. `left_s` is what the request may still take. Raises
        ApiError, and TimeoutError if that has passed."""
        try:
            async with asyncio.timeout(min(WAIT_S, left_s)):
                await self._gate.enter(scope, len(images))
                try:
                    return await self._in_thread(images, scope)
                finally:
                    self._gate.leave(scope)
        except TimeoutError:
            if left_s <= WAIT_S:
                raise
            raise overloaded("the images of this request could not be fetched in time") from None

    async def _fetch_all(self, images: Sequence[LinkedImage], scope: str) -> list[bytes]:
        connector = aiohttp.TCPConnector(
            resolver=Resolver(self._lookups, self._is_allowed, scope),
            use_dns_cache=False,
            force_close=True,
            limit=NUM_CONNECTIONS,
            ssl=True if self._tls is None else self._tls,
        )
        headers = {"User-Agent": "pipeline", "Accept": "image/*", "Accept-Encoding": "identity"}
        room = Room(self._max_bytes)
        async with aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=headers,
            auto_decompress=False,
            trust_env=False,
            read_bufsize=PIECE_BYTES,
        ) as session:
            try:
                async with asyncio.TaskGroup() as group:
                    connections = asyncio.Semaphore(NUM_CONNECTIONS)
                    tasks = [group.create_task(self._fetch_one(session, one, room, connections)) for one in images]
            except* ApiError as errors:
                raise _first(errors) from None
        return [task.result() for task in tasks]

    async def _fetch_one(
        self, session: aiohttp.ClientSession, image: LinkedImage, room: "Room", connections: asyncio.Semaphore
    ) -> bytes:
        async with connections:
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._read(session, image, room)
            except TimeoutError:
                raise _refused(image, f"could not be fetched within {self._timeout_s:g} s") from None
            except NoPublicAddressError:
                raise _refused(image, f"can't be fetched: '{image.url.host}' has no public address") from None
            except (aiohttp.ClientError, OSError, ValueError):  # their texts name addresses
                raise _refused(image, f"could not be fetched from '{image.url.host}'") from None

    async def _read(self, session: aiohttp.ClientSession, image: LinkedImage, room: "Room") -> bytes:
        async with session.get(image.url, allow_redirects=False) as response:
            if HTTPStatus.MULTIPLE_CHOICES <= response.status < HTTPStatus.BAD_REQUEST:
                raise _refused(image, f"is a redirect ({response.status}), and none are followed: send its target")
            if response.status != HTTPStatus.OK:
                raise _refused(image, f"can't be fetched: '{image.url.host}' answers {response.status}")
            if response.headers.get("Content-Encoding", "identity").lower() != "identity":
                raise _refused(image, "comes compressed (Content-Encoding), and was asked for as it is")
            room.take(response.content_length or 0, image, is_sure=False)
            pieces = []
            async for piece in response.content.iter_any():
                room.take(len(piece), image)
                pieces.append(piece)
            return b"".join(pieces)


class Room:
    """Bytes that the images of a request may still have."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = self._left = max_bytes

    def take(self, num_bytes: int, image: LinkedImage, *, is_sure: bool = True) -> None:
        """Raises ApiError if there is no room. `is_sure` False: only checks."""
        if num_bytes > self._left:
            raise _refused(
                image, f"is too large: the images of a request that are fetched have {self._max_bytes} bytes"
            )
        if is_sure:
            self._left -= num_bytes


class NoPublicAddressError(Exception):
    """A host has addresses, but none that the server may connect to."""


class Resolver(AbstractResolver):
    """Answers with the addresses of a host that may be connected to; aiohttp connects to them without another look. For
    one request."""

    def __init__(self, lookups: Lookups, is_allowed: Callable[[str], bool], scope: str) -> None:
        self._lookups, self._is_allowed, self._scope = lookups, is_allowed, scope

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Raises OSError, UnicodeError, NoPublicAddressError and ApiError."""
        found = await self._lookups.find(host, port, self._scope)
        if not (allowed := [one for one in found if self._is_allowed(one[1])]):
            raise NoPublicAddressError
        flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        return [
            ResolveResult(hostname=host, host=address, port=port, family=of, proto=socket.IPPROTO_TCP, flags=flags)
            for of, address in allowed
        ]

    async def close(self) -> None:
        """There is nothing to close."""


def _refused(image: LinkedImage, why: str) -> ApiError:
    return invalid(image.param, f"the image '{image.param}' {why}", "invalid_image")


def _first(errors: BaseExceptionGroup[ApiError]) -> ApiError:
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    assert isinstance(found, ApiError)
    return found
