"""The HTTP listener, and errors for requests that aiohttp can't parse.

Nothing else in this project may accept HTTP connections, and a listener can't be made without its rules.
"""

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from aiohttp.web_protocol import _ErrInfo

from pipeline.http_server.ends import DroppedRest, close_if_unclear, is_compressed
from pipeline.http_server.error_responses import error_of_parser, error_parts
from pipeline.http_server.head_limit import KEPT_HEAD_BYTES, MAX_HEADERS, HeadTooLarge, head_bytes, max_head_bytes
from pipeline.http_server.rejection_log import RejectionLog, http_log, is_of_client
from pipeline.http_server.request_turns import RequestTurns
from pipeline.http_server.rules import ListenerRules
from pipeline.http_server.server_header import set_server
from pipeline.http_server.sockets.arrivals import Arrivals
from pipeline.http_server.sockets.connections import HttpConnections
from pipeline.http_server.sockets.read_steps import STEP_BYTES, read_in_steps
from pipeline.http_server.sockets.slow_clients import UnreadReplies
from pipeline.runtime.security.client_address import client_address

BACKLOG = 1024
"""Connections waiting to be accepted. With aiohttp's default of 128, a burst of connections waits for TCP's timer."""
MAX_CHUNKS = 8192
"""Buffered chunks of a body; aiohttp stops at 16,384."""
MAX_PIPELINED = 2
"""Requests that wait behind the one that is answered before the connection is read no more, besides those of the same
read. With aiohttp's 32, a connection keeps as many bodies of 256 KiB, which nothing counts."""
BODY_STEP_BYTES = 64 * 1024
"""What is read at once of a body whose length is known: it is not parsed before all of it has arrived."""
LARGE_BODY_BYTES = 512 * 1024
"""Larger ones have their turns as this one has, in another class of pipeline/runtime/queues/fair_queue.py than what one
turn reads: a body that ends soon does not wait behind those that go on."""
IDLE_CONNECTION_S = 300.0  # keep-alive time of idle connections
CLOSE_S = 1.0  # time for responses to end at `cleanup`
HEAD_S = 30.0
"""Time for the head of a request, from its first byte; of the first request, from the connection's start."""


class HttpConnection(web.RequestHandler):
    """One connection. Its errors have the shape of their path."""

    __slots__ = (
        "_body_length",
        "_connections",
        "_head_timer",
        "_last_payload",
        "_max_head",
        "_num_of_head",
        "_rejection_log",
        "_rest",
        "address",
        "descriptor",
        "num_read",
        "raw",
        "receive",
    )

    def __init__(
        self, manager: web.Server, connections: HttpConnections, rejection_log: RejectionLog, **options: Any
    ) -> None:
        super().__init__(manager, **options)
        self._connections = connections
        self._rejection_log = rejection_log
        self._max_msg_queue_size, self._msg_queue_resume_size = MAX_PIPELINED, MAX_PIPELINED - 1
        self._max_head = max_head_bytes(self.max_field_size)
        self._num_of_head = 0
        """Bytes of the head that is arriving."""
        self._last_payload: StreamReader | None = None
        """The body of the last request whose head has arrived."""
        self._rest = DroppedRest()
        self._body_length = 0
        """Its length, if the head says it and the body is not compressed."""
        self.address = ""
        """Of its client."""
        self.descriptor = -1
        self.num_read = 0
        """Bytes of the last read. Of an arriving body, those so far, if they are more."""
        self.raw: asyncio.Transport | None = None
        """The transport that reads nothing but the connection's end: over TLS, the one below."""
        self.receive: Callable[[], None] | None = None
        """Reads in its place, over TLS."""

    @property
    def is_idle(self) -> bool:
        """Whether no request is being read, except for its head, or answered."""
        return self._current_request is None and not self._messages

    @property
    def is_kept_alive(self) -> bool:
        return self.is_idle and not self._num_of_head

    @property
    def is_paused(self) -> bool:
        """Whether aiohttp has paused reading."""
        return (self._reading_paused or self._buffer_paused) and not self._rest.is_on

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._head_timer: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        self.address = client_address(transport)
        self.descriptor = transport.get_extra_info("socket").fileno()
        self._connections.add(self)
        self._time_head()
        if self.raw is None:
            self.raw = cast(asyncio.Transport, transport)
            self.wait_turn()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.remove(self)
        self._stop_head_timer()
        self.raw = self.receive = None
        super().connection_lost(exc)

    def _time_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self._loop.call_later(HEAD_S, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._current_request is None:
            self.end()

    def end(self) -> None:
        """Close at once: over TLS, a client could take 30 s to agree, and keep the descriptor as long."""
        transport = self.transport
        self.force_close()
        if transport is not None:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Pass data to aiohttp. If it makes the body that a route reads invalid, aiohttp would report that only after
        the response, and the route would wait for the rest: fail the body now, and close the connection."""
        if self._rest.is_on:
            self._rest.drop(data)
            self.num_read = len(data)
            self.wait_turn()
            return
        num_messages, body = len(self._messages), self._last_payload
        is_in_head = body is None or body.is_eof()
        self._connections.heard(self)
        self.num_read = len(data)
        super().data_received(data)
        if len(self._messages) > num_messages:
            self._stop_head_timer()
            self._check_heads(num_messages)
            if any(getattr(message, "compression", None) for message, _ in self._messages):
                # aiohttp reads the rest of a body that a route did not read, so that the client reads the response.
                # Decompressing it for that could mean a gigabyte: see `finish_response`.
                self._lingering_time = 0.0
        elif data:
            if self._current_request is None and not self._messages:
                self._time_head()
            if is_in_head:
                self._check_arriving_head(len(data))
        self._refuse_small_chunks()
        if data:
            self.wait_turn()
        if len(self._messages) > num_messages and body is not None and not is_in_head:
            error = getattr(self._messages[-1][0], "exc", None)  # only invalid messages have one
            if isinstance(error, HttpProcessingError):
                self._messages.pop()
                broken = web.RequestPayloadError(error.message)
                broken.__cause__ = error
                body.set_exception(broken)
                self.close()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Called by aiohttp with a response. If the rest of a compressed body may come behind it, drop that."""
        response, is_lost = await super().finish_response(request, resp, start_time)
        if not is_lost and is_compressed(request) and not request.content.is_eof():
            self._rest.is_on = True
            self.wait_turn()
            if self.transport is not None and self.transport.can_write_eof():
                self.transport.write_eof()  # a client that reads to the end need not wait, too
            await self._rest.wait()
        return response, is_lost

    def _check_heads(self, num_before: int) -> None:
        """Refuse those of the requests after the first `num_before` whose heads are too large."""
        self._num_of_head = 0
        message, self._last_payload = self._messages[-1]
        self._body_length = 0
        if not isinstance(message, _ErrInfo) and not message.compression and not message.chunked:
            self._body_length = int(message.headers.get("Content-Length", 0))
        for index in range(num_before, len(self._messages)):
            message, payload = self._messages[index]
            if isinstance(message, _ErrInfo):
                continue
            if (num_bytes := head_bytes(message)) > self._max_head:
                self._messages[index] = self._too_large()
            elif num_bytes > KEPT_HEAD_BYTES:
                self._messages[index] = message._replace(should_close=True), payload

    def _check_arriving_head(self, num_bytes: int) -> None:
        """`num_bytes` of a head have arrived and have not completed it. If it is too large already, refuse it and read
        no more."""
        self._num_of_head += num_bytes
        if self._num_of_head > self._max_head and not self._close:
            self._messages.append(self._too_large())
            self._close = True
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)

    def _too_large(self) -> tuple[_ErrInfo, StreamReader]:
        error = HeadTooLarge(f"the head of a request may have at most {self._max_head} bytes")
        return _ErrInfo(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, error, error.message), EMPTY_PAYLOAD

    def wait_turn(self) -> None:
        """It was read: stop until more has arrived and it has its turn, whatever aiohttp wants meanwhile."""
        if self.raw is not None and not self.raw.is_closing() and self.transport is not None:
            self.raw.pause_reading()
            self.num_read = max(self.num_read, min(self._num_of_body, LARGE_BODY_BYTES))
            if not self.is_paused:
                self._connections.wait_turn(self)

    @property
    def _num_of_body(self) -> int:
        """Bytes of the arriving body that have arrived."""
        payload = self._last_payload
        return 0 if payload is None or payload.is_eof() else payload.total_bytes

    def go_on(self) -> None:
        if self.raw is None or self.is_paused:
            return
        if self.receive is not None:
            self.receive()
        elif (num_read := read_in_steps(self.raw, self._step, lambda: self.is_paused)) >= 0:
            self.num_read = num_read
            self.wait_turn()

    def _step(self) -> int:
        # The rest of a body whose length is known is not parsed as it arrives, so more of it is cheap.
        num_left = self._body_length - self._num_of_body
        if data := os.read(self.descriptor, min(max(STEP_BYTES, num_left), BODY_STEP_BYTES)):
            self.data_received(data)
        return len(data)

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Called by aiohttp with each part of a body that is read. It would parse again, although nothing waits for
        that unless it had paused."""
        if self._reading_paused:
            super().resume_reading(resume_parser)

    def _resume_transport_reading(self) -> None:
        """Called by aiohttp when it wants more."""
        if self.raw is not self.transport:  # over TLS, more may have arrived already
            super()._resume_transport_reading()
        if self.raw is not None and not self.raw.is_closing():
            self._connections.wait_turn(self)

    def _refuse_small_chunks(self) -> None:
        """Fail a body with too many buffered chunks. aiohttp copies the rest of its list for each chunk, so half a
        megabyte of one-byte chunks would block the loop for ten seconds."""
        current = self._current_request
        bodies = [payload for _, payload in self._messages] if self._messages else []
        for body in bodies if current is None else (*bodies, current.content):
            if len(getattr(body, "_http_chunk_splits", None) or ()) > MAX_CHUNKS and body.exception() is None:
                broken = web.RequestPayloadError("its chunks are too small")
                body.set_exception(broken)
                self.close()

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """Called by aiohttp for an exception in a route, and for invalid requests, whose clients get an error."""
        if not is_of_client(kwargs.get("exc_info")) and self._rejection_log.has_room_for_failure():
            super().log_exception(*args, **kwargs)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = HTTPStatus.INTERNAL_SERVER_ERROR,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The response to an invalid request, or to an exception in a route. It closes the connection; aiohttp logs the
        error. A client that does not take it would keep the connection, which closes only when it is empty."""
        if self.transport is not None:
            self._stop_head_timer()
            self._head_timer = self._loop.call_later(HEAD_S, self.transport.abort)
        response = super().handle_error(request, status, exc, message)
        assert isinstance(response, web.Response)
        error = error_of_parser(status, exc)
        response.set_status(error.status)
        response.body, headers = error_parts(request, error)
        response.headers.update(headers)
        response.content_type = "application/json"
        set_server(response)
        return response


class HttpListener:
    """Serves an application on an open socket, behind the rules of the listener: HTTP, or HTTPS with `tls`.

    It owns the application from `start` to `cleanup`, and the socket.
    """

    def __init__(
        self,
        app: web.Application,
        listener: socket.socket,
        rules: ListenerRules,
        *,
        max_header_bytes: int,
        tls: ssl.SSLContext | None = None,
        connections: HttpConnections,
        unread: UnreadReplies,
    ) -> None:
        """`max_header_bytes` bounds each line of a request's head. Listeners of one process may share `connections`
        and `unread`."""
        self._rules = rules
        self._listener = listener
        self._tls = tls
        self._connections = connections
        self._unread = unread
        self._options: dict[str, Any] = {
            "access_log": None,
            "logger": http_log(),
            "keepalive_timeout": IDLE_CONNECTION_S,
            "max_line_size": max_header_bytes,
            "max_field_size": max_header_bytes,
            "max_headers": MAX_HEADERS,
        }
        app.on_response_prepare.append(close_if_unclear)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=CLOSE_S, **self._options)
        self._site: _Site | None = None

    async def start(self) -> None:
        """Start to accept connections."""
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        server.request_handler = self._unread.wrap(self._rules.wrap(RequestTurns().wrap(server.request_handler)))
        self._site = _Site(self._runner, self._arrivals)
        await self._site.start()

    async def stop(self) -> None:
        """Accept no more connections, and end kept-alive ones. Where a request is open, it goes on. Idempotent."""
        if self._site is not None and self._site in self._runner.sites:
            await self._site.stop()
        self._connections.end_kept_alive()

    async def cleanup(self) -> None:
        """Close all connections, and the application. Idempotent."""
        if self._site is not None:
            await self._site.end()
        await self._runner.cleanup()
        self._connections.close()

    def _arrivals(self) -> Arrivals:
        return Arrivals(self._listener, self._connection, self._connections, tls=self._tls, timeout_s=HEAD_S)

    def _connection(self) -> HttpConnection:
        server = self._runner.server
        assert server is not None
        loop = asyncio.get_running_loop()
        return HttpConnection(server, self._connections, self._rules.rejection_log, loop=loop, **self._options)


class _Site(web.BaseSite):
    """Has connections of our own."""

    def __init__(self, runner: web.AppRunner, accept: Callable[[], Arrivals]) -> None:
        super().__init__(runner)
        self._accept = accept
        self._arrivals: Arrivals | None = None

    @property
    def name(self) -> str:
        return "http"

    async def start(self) -> None:
        await super().start()
        self._arrivals = self._accept()

    async def stop(self) -> None:
        if self._arrivals is not None:
            self._arrivals.close()
        await super().stop()

    async def end(self) -> None:
        """End connections that have not begun. Idempotent."""
        if self._arrivals is not None:
            await self._arrivals.end()
