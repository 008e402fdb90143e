"""Keep-alives in a stream of server-sent events: without them, proxies and clients take a long silence (a long prompt,
a queue) for a dead connection."""

import asyncio
from collections.abc import Callable

from aiohttp import web


class KeepAlive:
    """A context manager around the events of a stream, except for the last bytes: calls `write` whenever nothing was
    written for `interval_s`, or up to twice as long. 0 is never. Nothing is written while the client reads slowly."""

    def __init__(self, http_request: web.Request, interval_s: float, write: Callable[[], None]) -> None:
        self._http_request = http_request
        self._interval_s = interval_s
        self._write = write
        self._num_written = -1
        self.is_in_event = False
        """A part of an event was written, and the rest will be: nothing may come between."""
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> "KeepAlive":
        self._set_timer()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self) -> None:
        if self._interval_s:
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._check)

    def _check(self) -> None:
        transport = self._http_request.transport
        if transport is None or transport.is_closing():
            return
        is_silent = self._http_request.writer.output_size == self._num_written and not self.is_in_event
        if is_silent and not transport.get_write_buffer_size():
            self._write()
        self._num_written = self._http_request.writer.output_size
        self._set_timer()
