"""Clients that don't read their replies: they are disconnected after a time, or earlier if they keep much memory.

    handler ──response──► transport ──► kernel ──► client
                            └─ what is left here counts until the client has taken it

Every listener sends through `UnreadReplies.wrap` what its handlers return, so no reply is without a deadline, and a
connection that pipelines its requests has one reply at a time. Handlers that send themselves have a deadline of their
own: `SlowClientTimeout` while they write, or `UnreadReplies.counted` besides it.
"""

import asyncio
import contextlib
import heapq
from collections.abc import Callable, Iterator
from typing import Any

from aiohttp import web

from pipeline.http_server.access.guard import Handle, current_scope
from pipeline.runtime.process import suspension
from pipeline.runtime.security.client_address import client_address

HIGH_BYTES = 16 * 1024
"""Bytes buffered in the transport of a slow client, besides one piece of PIECE_BYTES."""
PIECE_BYTES = 64 * 1024
"""The most that `write` gives to the transport at once."""
UNREAD_PART = 4
"""Complete replies that clients have not taken may have a quarter of the bytes of open requests, on top of these."""
MIN_UNREAD_BYTES = 16 * 1024**2
"""But at least this much, so that small servers can send their largest pages to a few slow clients."""


def max_unread_bytes(max_open_bytes: int) -> int:
    """The limit of `UnreadReplies`."""
    return max(max_open_bytes // UNREAD_PART, MIN_UNREAD_BYTES)


class SlowClientTimeout:
    """Bounds the transport's buffer while a response is written, and disconnects a client that reads nothing: between
    two checks some bytes must be sent, unless the buffer is empty. A client that reads slowly is not disconnected.

    Aborting the connection cancels the task that writes to it, as if the client had disconnected.
    """

    def __init__(self, http_request: web.BaseRequest, timeout_s: float) -> None:
        if http_request.transport is None or http_request.transport.is_closing():
            raise ConnectionResetError("the client has disconnected")
        self._transport = http_request.transport
        self._transport.set_write_buffer_limits(high=HIGH_BYTES, low=0)
        self._writer = http_request.writer
        self._timeout_s = timeout_s
        self._num_sent = -1

    def __enter__(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._check)

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        num_buffered = self._transport.get_write_buffer_size()
        num_sent = self._writer.output_size - num_buffered
        if num_buffered and num_sent == self._num_sent and not suspension.missed(self._timer.when()):
            self._transport.abort()
            return
        self._num_sent = num_sent
        self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._check)


async def flushed(http_request: web.BaseRequest) -> None:
    """Wait until the kernel has all written bytes; over TLS, all but PIECE_BYTES and what its transport begins with."""
    if http_request.transport is not None:
        # With high = 0, a TLS transport stops an empty buffer, and starts it only when the client sends something.
        http_request.transport.set_write_buffer_limits(high=1 if _is_tls(http_request) else 0, low=0)
    await http_request.writer.drain()


async def write(http_request: web.BaseRequest, response: web.StreamResponse, data: bytes) -> None:
    """Write a part of a body in pieces, and wait while the client is slow. A transport would copy a large part. What a
    TLS transport has encrypted is in the buffer of the transport below it, whose size it doesn't tell, and the first
    write goes there as a whole."""
    view = memoryview(data)
    for begin in range(0, len(data), PIECE_BYTES):
        await response.write(view[begin : begin + PIECE_BYTES])
        await http_request.writer.drain()


async def send(http_request: web.BaseRequest, response: web.StreamResponse, timeout_s: float) -> None:
    """Send a response, or what is left of it. Raises ConnectionError if the client disconnects, or is disconnected
    because it reads nothing for `timeout_s`."""
    if _body_bytes(response) <= PIECE_BYTES:
        await send_body(http_request, response)  # which waits for nothing: the transport takes all of it
        if http_request.transport is None or not http_request.transport.get_write_buffer_size():
            return
    with SlowClientTimeout(http_request, timeout_s):
        await send_body(http_request, response)
        await flushed(http_request)


async def send_body(http_request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Prepare a response and write what it has not written yet, and its end. A transport would copy a large body twice,
    while everybody else waits."""
    body = response.body if isinstance(response, web.Response) and not response.prepared else None
    await response.prepare(http_request)
    if isinstance(body, bytes) and len(body) > PIECE_BYTES and http_request.method != "HEAD":
        await write(http_request, response, body)
        await web.StreamResponse.write_eof(response)
    else:
        await response.write_eof()


def _is_tls(http_request: web.BaseRequest) -> bool:
    return http_request.transport is not None and http_request.transport.get_extra_info("sslcontext") is not None


class _Unread:
    """What one client has not taken."""

    def __init__(self, request: web.BaseRequest, num_bytes: int, scope: str, address: str, begin_s: float) -> None:
        self.transport: Any = request.transport
        self._writer = request.writer
        self._num_before = self._num_sent
        self.num_bytes = num_bytes
        self.client = bool(scope), scope or address
        """Orders by who loses connections first: those without a key, if there are keys."""
        self._begin_s = begin_s

    @property
    def _num_sent(self) -> int:
        """Bytes of this connection that the kernel has taken, of the current reply."""
        return int(self._writer.output_size) - int(self.transport.get_write_buffer_size())

    def rate(self, now_s: float) -> tuple[float, float]:
        """Orders by what the client takes in a second, then by age."""
        num_taken = self._num_sent - self._num_before
        return num_taken / (now_s - self._begin_s + 1.0), self._begin_s


class UnreadReplies:
    """Replies that are built, and that clients have not taken yet, of one process. If they are too large together,
    clients without a key lose connections first, then the API key that has the most of them (without keys: the
    address). Each loses those that take the least."""

    def __init__(self, max_bytes: Callable[[], int], slow_client_timeout_s: float) -> None:
        """`max_bytes` is asked each time. A client that takes nothing for `slow_client_timeout_s`, or at most twice
        that, is disconnected."""
        self._max_bytes = max_bytes
        self._timeout_s = slow_client_timeout_s
        self._unread: dict[_Unread, None] = {}
        self.num_bytes = 0
        """As they were when their clients began to take them."""

    def wrap(self, handle: Handle) -> Handle:
        """Wrap `handle`, which is outside of all routes and checks: send what it returns."""

        async def sent(request: web.BaseRequest) -> web.StreamResponse:
            response = await handle(request)
            try:
                with self.counted(request, _body_bytes(response)):
                    await send(request, response, self._timeout_s)
                if isinstance(response, web.Response):
                    response.body = None  # aiohttp keeps the response until the connection's next request
            except ConnectionError:
                pass  # aiohttp finds that too, and ends the connection
            return response

        return sent

    @contextlib.contextmanager
    def counted(self, request: web.BaseRequest, num_more: int = 0) -> Iterator[None]:
        """Count what is left of a reply to this request, and `num_more` bytes that will be written now, while the
        client takes it. Another client may be disconnected for it."""
        transport = request.transport
        if transport is None or not (num_bytes := transport.get_write_buffer_size() + num_more):
            yield
            return
        now_s = asyncio.get_running_loop().time()
        unread = _Unread(request, num_bytes, current_scope(), client_address(transport), now_s)
        self.num_bytes += num_bytes
        if self.num_bytes > self._max_bytes():
            self._make_room()
        self._unread[unread] = None  # now, so that it is not disconnected at once
        try:
            yield
        finally:
            self._remove(unread)

    def _make_room(self) -> None:
        """Disconnect clients until a part is free again, so that this is not done for each reply."""
        now_s, most = asyncio.get_running_loop().time(), self._max_bytes()
        of_client: dict[tuple[bool, str], list[_Unread]] = {}
        for one in self._unread:
            of_client.setdefault(one.client, []).append(one)
        for each in of_client.values():
            each.sort(key=lambda one: one.rate(now_s), reverse=True)
        # There may be as many clients as connections, so the first of them is not searched each time.
        queue = [(client[0], -sum(one.num_bytes for one in each), client) for client, each in of_client.items()]
        heapq.heapify(queue)
        while self.num_bytes > most - most // 8 and queue:
            has_key, size, client = heapq.heappop(queue)
            victim = of_client[client].pop()
            if of_client[client]:
                heapq.heappush(queue, (has_key, size + victim.num_bytes, client))
            self._remove(victim)
            victim.transport.abort()

    def _remove(self, unread: _Unread) -> None:
        """Idempotent."""
        if unread in self._unread:
            del self._unread[unread]
            self.num_bytes -= unread.num_bytes


def _body_bytes(response: web.StreamResponse) -> int:
    """What will be written of a response."""
    body = response.body if isinstance(response, web.Response) and not response.prepared else None
    return len(body) if isinstance(body, bytes) else 0
