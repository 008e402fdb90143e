"""Getting a response to the client.

    Sequence.pending ──events, when there is room──► transport, HIGH_BYTES at most ──► kernel ──► client

While a client keeps up, a write is done at once and waits for nothing. When more than HIGH_BYTES wait in the transport,
the client's own task waits until they have left; meanwhile what comes for it stays in its call, where it is bounded by
the longest sequence, and is joined into one event. So each client holds up its own task alone. One that takes nothing
for `gateway.slow_client_timeout_s`, and at most twice that, is cut off, and its requests are aborted. Once a response
is over, the kernel has all of it.
"""

import asyncio
import contextlib
from collections.abc import Callable

from aiohttp import web

from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.replies import responses, shapes
from pipeline.stages.gateway.requests import Call

HIGH_BYTES = 16 * 1024
"""The most that waits in the transport of a client that does not keep up, besides one event."""
HEADERS_AFTER_S = 1.0
"""A stream's headers go out this long after its prompts were accepted, even if nothing has been computed. Until then
an error gets its own HTTP status; from then on the client, and proxies between, see that the request is alive."""

EVENT_STREAM = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


async def send(request: web.Request, response: web.Response, patience_s: float) -> web.StreamResponse:
    """Send a response whole. Raises ConnectionError when the client is gone; one that takes nothing for `patience_s` is
    cut off."""
    with _Watch(request, patience_s):
        await response.prepare(request)
        await response.write_eof()
        await _all_taken(request)
    return response


async def send_whole(
    request: web.Request, call: Call, patience_s: float, body_of: Callable[[Call], bytes] | None = None
) -> web.StreamResponse:
    """Wait for the end of a call and send its response: what `body_of` makes of it, or what its shape is. Raises
    ApiError where it fails, ConnectionError as `send`."""
    await call.until(lambda: call.is_finished)
    body = body_of(call) if body_of is not None else shapes.told(call, await _body_of(call))
    response = web.Response(body=body, content_type="application/json", headers=_headers(call))
    return await send(request, response, patience_s)


async def _body_of(call: Call) -> bytes:
    """A finished call changes no more, but for what making its body takes from it."""
    return await asyncio.to_thread(shapes.body_of, call) if shapes.is_large(call) else shapes.body_of(call)


async def send_stream(request: web.Request, call: Call, patience_s: float) -> web.StreamResponse:
    """Send a call's events as they come. Raises ApiError where it fails before the headers are out; later errors are
    events. Raises ConnectionError as `send`."""
    await _begun(call)
    response = web.StreamResponse(headers=EVENT_STREAM | _headers(call))
    events = shapes.events(call)
    with _Watch(request, patience_s):
        await response.prepare(request)
        request.writer.send_headers()
        data = events.first() + events.due()
        while not events.are_over:
            if data:
                await response.write(data)
                await request.writer.drain()
            try:
                if events.has_more:
                    await asyncio.sleep(0)
                else:
                    await call.change()
            except ApiError as error:
                data = events.due() + responses.error_events(error)
                break
            data = events.due()
        else:
            data += events.last()
        await response.write_eof(data)
        await _all_taken(request)
    return response


async def _begun(call: Call) -> None:
    """Wait until it is time for the headers. What repeats its prompts, or their ids, has nothing to say before they
    have come."""
    echo = call.ask.echo or call.ask.details.with_ids
    await call.until(lambda: call.is_accepted or (call.has_begun and not echo) or call.is_finished)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(HEADERS_AFTER_S):
            await call.until(lambda: call.has_begun or call.is_finished)


async def _all_taken(request: web.Request) -> None:
    """Wait until the kernel has all that was written."""
    if request.transport is not None:
        request.transport.set_write_buffer_limits(high=0)
    await request.writer.drain()


class _Watch:
    """Bounds what waits for a client while a response is written, and cuts it off when it takes nothing: at each look
    something must have left for the kernel since the last, or nothing may be waiting. A client that takes a little now
    and then is given its time. As a context manager it ends with the response.

    A connection that is cut off ends the task that writes to it, like one whose client has left.
    """

    def __init__(self, request: web.Request, patience_s: float) -> None:
        if request.transport is None:
            raise ConnectionResetError("the client is gone")
        self._transport = request.transport
        self._transport.set_write_buffer_limits(high=HIGH_BYTES, low=0)
        self._writer = request.writer
        self._patience_s = patience_s
        self._num_taken = -1

    def __enter__(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._patience_s, self._look)

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        num_waiting = self._transport.get_write_buffer_size()
        num_taken = self._writer.output_size - num_waiting
        if num_waiting and num_taken == self._num_taken:
            self._transport.abort()
            return
        self._num_taken = num_taken
        self._timer = asyncio.get_running_loop().call_later(self._patience_s, self._look)


def _headers(call: Call) -> dict[str, str]:
    return {"X-Request-Id": call.id}
