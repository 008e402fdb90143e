"""Writes a response to a client of the ingress, as its parts arrive from a replica."""

import asyncio
import contextlib
from collections.abc import Callable

from aiohttp import web

from pipeline.http_server.sockets.slow_clients import UnreadReplies

HIGH_BYTES = 64 * 1024
"""Bytes buffered for a client, from which on nothing more is read from its replica."""


class ClientWriter:
    """`write` passes bytes on at once, from callbacks of the event loop. If it can't, because the headers are not sent
    or the client reads slowly, it sets `wake`, and the request's task calls `flush`."""

    def __init__(self, http_request: web.Request, slow_client_s: float, unread: UnreadReplies) -> None:
        """A client that takes nothing for `slow_client_s` is disconnected. `unread` counts what it has not taken."""
        self._slow_client_s = slow_client_s
        self._unread = unread
        self._http_request = http_request
        self.wake = asyncio.Event()
        self.pause: Callable[[], None] = lambda: None
        """Stops reading from the replica."""
        self.response: web.StreamResponse | None = None
        """Set it before the first `write`."""
        self._is_prepared = False
        self._is_chunked = False
        self._pending: list[bytes] = []
        self.has_begun = False
        """Something was written, or will be."""

    @property
    def must_flush(self) -> bool:
        return bool(self._pending)

    def write(self, data: bytes) -> None:
        if not data or self._http_request.method == "HEAD":
            return
        self.has_begun = True
        transport = self._http_request.transport
        if not self._is_prepared or transport is None or transport.get_write_buffer_size() > HIGH_BYTES:
            self._pending.append(data)
            self.pause()
            self.wake.set()
            return
        if not transport.is_closing():
            transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    async def flush(self) -> None:
        """Send the headers and what is pending, and wait until the client has taken most of it. Raises ConnectionError
        if it is gone."""
        response, request = self.response, self._http_request
        assert response is not None
        if not self._is_prepared:
            await response.prepare(request)
            request.writer.send_headers()
            self._is_prepared = True
            self._is_chunked = "Transfer-Encoding" in response.headers
        pending, self._pending = self._pending, []
        if request.transport is None or request.transport.is_closing():
            raise ConnectionResetError("the client has disconnected")
        for data in pending:
            request.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)
        await self._drain()

    async def _drain(self) -> None:
        """Wait until the client has taken most of what was written. Raises ConnectionError."""
        with self._unread.counted(self._http_request):
            await self._drained()

    async def _drained(self) -> None:
        request, num_left = self._http_request, -1
        while (transport := request.transport) is not None:
            num_before, num_left = num_left, transport.get_write_buffer_size()
            if num_before >= 0 and num_left >= num_before:
                transport.abort()
                raise ConnectionResetError(f"the client took nothing for {self._slow_client_s:g} s")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._slow_client_s):
                    await request.writer.drain()
                return

    def abort(self) -> None:
        """End the connection: what was written is not the whole response."""
        if self._http_request.transport is not None:
            self._http_request.transport.abort()

    async def end(self) -> web.StreamResponse:
        """Everything was written."""
        assert self.response is not None
        if self._pending or not self._is_prepared:
            await self.flush()
        await self.response.write_eof()
        return self.response
