"""Writes a response to a client of the ingress, as its parts arrive from a replica."""

import asyncio
from collections.abc import Callable

from aiohttp import web

HIGH_BYTES = 64 * 1024
"""Bytes buffered for a client, from which on nothing more is read from its replica."""
SLOW_CLIENT_S = 60.0
"""A client that takes nothing for so long is disconnected."""


class ClientWriter:
    """`write` passes bytes on at once, from callbacks of the event loop. If it can't, because the headers are not sent
    or the client reads slowly, it sets `wake`, and the request's task calls `flush`."""

    def __init__(self, http_request: web.Request) -> None:
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
        if not data:
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
        try:
            async with asyncio.timeout(SLOW_CLIENT_S):
                await request.writer.drain()
        except TimeoutError as error:
            request.transport.abort()
            raise ConnectionResetError(f"the client took nothing for {SLOW_CLIENT_S:g} s") from error

    async def end(self) -> web.StreamResponse:
        """Everything was written."""
        assert self.response is not None
        if self._pending or not self._is_prepared:
            await self.flush()
        await self.response.write_eof()
        return self.response
