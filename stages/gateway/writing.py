"""Getting a response to the client.

The transport's own buffer is kept empty: what a slow client has not taken waits in its call, where it is bounded by
the longest sequence and is joined into one event. So each client holds up its own task alone, and once a response is
over, the kernel has all of it.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from aiohttp import web

from pipeline.stages.gateway import responses
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.requests import Call

WRITE_TIMEOUT_S = 60.0
"""Longest that a client may take for what one write sends it."""
HEADERS_AFTER_S = 1.0
"""A stream's headers go out this long after its prompts were accepted, even if nothing has been computed. Until then
an error gets its own HTTP status; from then on the client, and proxies between, see that the request is alive."""

EVENT_STREAM = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


async def send(request: web.Request, response: web.Response) -> web.StreamResponse:
    """Send a response whole. Raises ConnectionError when the client is gone or takes nothing."""
    with _unbuffered(request):
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await response.prepare(request)
            await response.write_eof()
    return response


async def send_whole(
    request: web.Request, call: Call, body_of: Callable[[Call], bytes] = responses.whole
) -> web.StreamResponse:
    """Wait for the end of a call and send its response. Raises ApiError where it fails, ConnectionError as `send`."""
    await call.until(lambda: call.is_finished)
    body = body_of(call)
    return await send(request, web.Response(body=body, content_type="application/json", headers=_headers(call)))


async def send_stream(request: web.Request, call: Call) -> web.StreamResponse:
    """Send a call's events as they come. Raises ApiError where it fails before the headers are out; later errors are
    events. Raises ConnectionError as `send`."""
    await _begun(call)
    response = web.StreamResponse(headers=EVENT_STREAM | _headers(call))
    events = responses.Events(call)
    with _unbuffered(request):
        await response.prepare(request)
        request.writer.send_headers()
        data = events.first() + events.due()
        while not events.are_over:
            await _write(request, response, data)
            try:
                await call.change()
            except ApiError as error:
                data = events.due() + responses.error_events(error)
                break
            data = events.due()
        else:
            data += events.last()
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await response.write_eof(data)
    return response


async def _begun(call: Call) -> None:
    """Wait until it is time for the headers. What echoes its prompts has nothing to say before they have come."""
    echo = call.ask.echo
    await call.until(lambda: call.is_accepted or (call.has_begun and not echo) or call.is_finished)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(HEADERS_AFTER_S):
            await call.until(lambda: call.has_begun or call.is_finished)


async def _write(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    if data:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await response.write(data)
            await request.writer.drain()


@contextlib.contextmanager
def _unbuffered(request: web.Request) -> Iterator[None]:
    """Writes inside wait until the kernel has taken them; a client that takes nothing is cut off."""
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the client is gone")
    transport.set_write_buffer_limits(high=0)
    try:
        yield
    except TimeoutError:
        transport.abort()
        raise ConnectionResetError("the client takes nothing") from None


def _headers(call: Call) -> dict[str, str]:
    return {"X-Request-Id": call.id}
