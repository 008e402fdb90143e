"""Clients that don't read their replies: they are disconnected after a time, or earlier if they keep much memory.

    handler ──response──► transport ──► kernel ──► client
                            └─ what is left here counts until the client has taken it

Every listener sends through `UnreadReplies.wrap` what its handlers return, so no reply is without a deadline, and a
connection that pipelines its requests has one reply at a time. Handlers that send themselves have a deadline of their
own: `SlowClientTimeout` while they write, or `UnreadReplies.counted` besides it.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from aiohttp import web

from pipeline.http_server.access.guard import Handle, current_scope
from pipeline.http_server.sockets.deliveries import Deliveries, Delivery, client_of, in_turn
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
    if await sent_at_once(http_request, response):
        return
    with SlowClientTimeout(http_request, timeout_s):
        await send_body(http_request, response)
        await flushed(http_request)


async def sent_at_once(http_request: web.BaseRequest, response: web.StreamResponse) -> bool:
    """Send a small response without waiting. Returns whether the kernel has all of it; else `send` sends the rest.
    Raises ConnectionError if the client has disconnected."""
    if http_request.transport is None or _body_bytes(response) > PIECE_BYTES:
        return False
    await send_body(http_request, response)  # which waits for nothing: the transport takes all of it
    return http_request.transport is None or not http_request.transport.get_write_buffer_size()


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


def http_delivery(
    request: web.BaseRequest, num_bytes: Callable[[], int], scope: str, stop: Callable[[], object] = lambda: None
) -> Delivery:
    """What waits for the client of a request. It is given up with its connection, after `stop`. Raises ConnectionError
    if the client has disconnected."""
    transport, writer = request.transport, request.writer
    if transport is None:
        raise ConnectionResetError("the client has disconnected")
    client = client_of(scope, client_address(transport))

    def abort() -> None:
        stop()
        transport.abort()

    return Delivery(client, lambda: int(writer.output_size) - transport.get_write_buffer_size(), abort, num_bytes)


class UnreadReplies:
    """Replies that are built, and that clients have not taken yet, of one process. If they are too large together,
    clients lose connections, in the order of deliveries.py."""

    def __init__(self, max_bytes: Callable[[], int], slow_client_timeout_s: float, deliveries: Deliveries) -> None:
        """`max_bytes` is asked each time. A client that takes nothing for `slow_client_timeout_s`, or at most twice
        that, is disconnected. `deliveries` may have others, too."""
        self._max_bytes = max_bytes
        self._timeout_s = slow_client_timeout_s
        self.deliveries = deliveries
        self._unread: dict[Delivery, int] = {}
        """With the bytes that count for each."""
        self.num_bytes = 0
        """As they were when their clients began to take them."""

    def wrap(self, handle: Handle) -> Handle:
        """Wrap `handle`, which is outside of all routes and checks: send what it returns."""

        async def sent(request: web.BaseRequest) -> web.StreamResponse:
            response = await handle(request)
            transport = request.transport
            if response.prepared and transport is not None and not transport.get_write_buffer_size():
                await response.write_eof()  # nothing, if its handler has sent all of it
                _drop_body(response)
                return response
            try:
                with self.counted(request, _body_bytes(response)):
                    await send(request, response, self._timeout_s)
                _drop_body(response)
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
        unread = http_delivery(request, lambda: num_bytes, current_scope())
        self.count(unread, num_bytes)
        try:
            yield
        finally:
            self.remove(unread)

    def count(self, unread: Delivery, num_bytes: int) -> None:
        """Count what waits for a client until `remove`. Another client may be disconnected for it, but not this one."""
        self.num_bytes += num_bytes
        if self.num_bytes > self._max_bytes():
            self._make_room()
        self._unread[unread] = num_bytes
        self.deliveries.add(unread)

    def update(self, unread: Delivery, num_bytes: int) -> None:
        """So much waits now, unless it was given up."""
        if unread not in self._unread:
            return
        self.num_bytes += num_bytes - self._unread[unread]
        self._unread[unread] = num_bytes
        if self.num_bytes > self._max_bytes():
            self._make_room()

    def remove(self, unread: Delivery) -> None:
        """Idempotent."""
        self.num_bytes -= self._unread.pop(unread, 0)
        self.deliveries.remove(unread)

    def _make_room(self) -> None:
        """Disconnect clients until a part is free again, so that this is not done for each reply. None of them has to
        be slow: what all of them keep is bounded."""
        most = self._max_bytes()
        for one in in_turn(self._unread, asyncio.get_running_loop().time()):
            if self.num_bytes <= most - most // 8:
                return
            self.remove(one)
            self.deliveries.give_up(one)


def _drop_body(response: web.StreamResponse) -> None:
    """Of a response that was sent: aiohttp keeps it until the connection's next request."""
    if isinstance(response, web.Response):
        response.body = None


def _body_bytes(response: web.StreamResponse) -> int:
    """What will be written of a response."""
    body = response.body if isinstance(response, web.Response) and not response.prepared else None
    return len(body) if isinstance(body, bytes) else 0
