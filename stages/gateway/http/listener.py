"""The HTTP listener, and errors for requests that aiohttp can't parse."""

import asyncio
import socket
import ssl
from http import HTTPStatus
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage, ContentEncodingError, HttpProcessingError, LineTooLong

from pipeline.stages.gateway.errors import ApiError, shown, unsupported_encoding
from pipeline.stages.gateway.http.error_responses import error_parts
from pipeline.stages.gateway.http.server_header import set_server

BACKLOG = 1024
"""Connections waiting to be accepted. With aiohttp's default of 128, a burst of connections waits for TCP's timer."""
MAX_HEADERS = 128
"""Headers of a request."""
MAX_CHUNKS = 8192
"""Buffered chunks of a body. aiohttp stops reading at 16,384."""
HEAD_S = 30.0
"""Time for the head of a request to arrive, from its first byte; for the first request, from the connection's start. A
client that sends a byte now and then would keep a descriptor for ever."""


class HttpConnection(web.RequestHandler):
    """One connection. Its errors have the shape of their path."""

    __slots__ = ("_head_timer",)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._head_timer: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        self._time_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_head_timer()
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
            self.force_close()

    def data_received(self, data: bytes) -> None:
        """Pass data to aiohttp. If it makes the body that a route reads invalid, aiohttp would report that only after
        the response, and the route would wait for the rest: fail the body now, and close the connection."""
        num_messages = len(self._messages)
        super().data_received(data)
        if len(self._messages) > num_messages:
            self._stop_head_timer()
            if any(getattr(message, "compression", None) for message, _ in self._messages):
                # aiohttp reads and drops the rest of a body that a route did not read, so that the client reads the
                # response. Decompressing it for that could mean a gigabyte.
                self._lingering_time = 0.0
        elif data and self._current_request is None and not self._messages:
            self._time_head()
        self._refuse_small_chunks()
        reading = self._current_request
        if len(self._messages) > num_messages and reading is not None and not reading.content.is_eof():
            error = getattr(self._messages[-1][0], "exc", None)  # only invalid messages have one
            if isinstance(error, HttpProcessingError):
                self._messages.pop()
                broken = web.RequestPayloadError(error.message)
                broken.__cause__ = error
                reading.content.set_exception(broken)
                self.close()

    def _refuse_small_chunks(self) -> None:
        """Fail a body with too many buffered chunks. aiohttp copies the rest of its list for each chunk, so half a
        megabyte of one-byte chunks would block the loop for ten seconds."""
        bodies = [payload for _, payload in self._messages]
        if self._current_request is not None:
            bodies.append(self._current_request.content)
        for body in bodies:
            if len(getattr(body, "_http_chunk_splits", None) or ()) > MAX_CHUNKS and body.exception() is None:
                broken = web.RequestPayloadError("its chunks are too small")
                body.set_exception(broken)
                self.close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = HTTPStatus.INTERNAL_SERVER_ERROR,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The response to an invalid request, or to an exception in a route. It closes the connection; aiohttp logs the
        error."""
        response = super().handle_error(request, status, exc, message)
        assert isinstance(response, web.Response)
        error = _error_of(status, exc)
        response.set_status(error.status)
        response.body, headers = error_parts(request, error)
        response.headers.update(headers)
        response.content_type = "application/json"
        set_server(response)
        return response


def _error_of(status: int, exc: BaseException | None) -> ApiError:
    match exc:
        case LineTooLong():
            return ApiError(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "a line of the request's head is too long", code="too_large"
            )
        case BadHttpMessage(message=message) if message.startswith("Too many headers"):
            return ApiError(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"a request may have at most {MAX_HEADERS} headers",
                code="too_large",
            )
        case ContentEncodingError(message=message) if "install" in message:  # it names a package to install
            return unsupported_encoding("")
        case HttpProcessingError():
            lines = exc.message.partition("\n")[0].rstrip(":")
            return ApiError(status, f"cannot read the request: {shown(lines)}", code="invalid_http")
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "internal server error")


class HttpListener(web.SockSite):
    """Serves HTTP, or HTTPS with `tls`, on an open socket. `options` are those of `web.AppRunner`."""

    def __init__(
        self,
        runner: web.AppRunner,
        listener: socket.socket,
        options: dict[str, Any],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(runner, listener, backlog=BACKLOG, ssl_context=tls)
        self._tls = tls
        self._listener = listener
        self._options = options

    async def start(self) -> None:
        """Start accepting connections: like SockSite, but with HttpConnection."""
        await web.BaseSite.start(self)
        loop = asyncio.get_running_loop()
        server = self._runner.server
        assert server is not None
        self._server = await loop.create_server(
            lambda: HttpConnection(server, loop=loop, **self._options),
            sock=self._listener,
            backlog=BACKLOG,
            ssl=self._tls,
            ssl_handshake_timeout=HEAD_S if self._tls is not None else None,
        )
