"""The listening socket, and what is said to clients whose requests aiohttp itself can't read."""

import asyncio
import socket
from http import HTTPStatus
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage, ContentEncodingError, HttpProcessingError, LineTooLong

from pipeline.stages.gateway.errors import ApiError, shown, unsupported_encoding

BACKLOG = 1024
"""Connections that may wait to be accepted; aiohttp's own 128 makes a crowd that comes at once wait for TCP's timer."""


MAX_HEADERS = 128
"""Of a request."""
MAX_CHUNKS = 8192
"""Chunks of a body that may wait to be read. aiohttp stops reading at 16,384."""
HEAD_S = 30.0
"""Longest that the head of a request may take to come, from its first byte on, and that of a connection's first request
from the beginning. It costs nothing to say a byte now and then, and a connection that does takes a descriptor."""


class Protocol(web.RequestHandler):
    """One connection. Its errors have OpenAI's shape like all others."""

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
        """Bytes have come. Where they break off a body that a route reads, aiohttp would tell it after its response
        alone, and leave it waiting for the rest: the route is told now, and nothing more is read."""
        num_messages = len(self._messages)
        super().data_received(data)
        if len(self._messages) > num_messages:
            self._stop_head_timer()
            if any(getattr(message, "compression", None) for message, _ in self._messages):
                # What a route has left of a body is read and thrown away for a while, so that the client comes to read
                # the response. Unpacking it for that could take a gigabyte's time.
                self._lingering_time = 0.0
        elif data and self._current_request is None and not self._messages:
            self._time_head()
        self._refuse_crumbs()
        reading = self._current_request
        if len(self._messages) > num_messages and reading is not None and not reading.content.is_eof():
            error = getattr(self._messages[-1][0], "exc", None)  # only what can't be read has one
            if isinstance(error, HttpProcessingError):
                self._messages.pop()
                broken = web.RequestPayloadError(error.message)
                broken.__cause__ = error
                reading.content.set_exception(broken)
                self.close()

    def _refuse_crumbs(self) -> None:
        """End a body whose chunks are so small that more of them wait than aiohttp reads at once: from there on it
        copies what is left of them for each, so that half a megabyte of chunks of a byte takes ten seconds, in which
        nobody is served."""
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
        """The response to what is no request, or to what a route did not catch. It ends the connection; the log has it
        from aiohttp."""
        response = super().handle_error(request, status, exc, message)
        assert isinstance(response, web.Response)
        error = _error_of(status, exc)
        response.set_status(error.status)
        response.body = error.json()
        response.content_type = "application/json"
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
                f"a request has at most {MAX_HEADERS} headers",
                code="too_large",
            )
        case ContentEncodingError(message=message) if "install" in message:  # what this server is, is not its affair
            return unsupported_encoding("")
        case HttpProcessingError():
            lines = exc.message.partition("\n")[0].rstrip(":")
            return ApiError(status, f"the request can't be read: {shown(lines)}", code="invalid_http")
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "the server failed on this request")


class Site(web.SockSite):
    """Serves HTTP on a socket that is open already. `options` are those of `web.AppRunner`."""

    def __init__(self, runner: web.AppRunner, listener: socket.socket, options: dict[str, Any]) -> None:
        super().__init__(runner, listener, backlog=BACKLOG)
        self._listener = listener
        self._options = options

    async def start(self) -> None:
        """Begin to accept connections. As SockSite does it, but for the protocol."""
        await web.BaseSite.start(self)
        loop = asyncio.get_running_loop()
        server = self._runner.server
        assert server is not None
        self._server = await loop.create_server(
            lambda: Protocol(server, loop=loop, **self._options), sock=self._listener, backlog=BACKLOG
        )
