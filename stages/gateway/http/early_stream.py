"""A stream whose headers are sent before its request is opened, because its model is being loaded: it has keep-alives
meanwhile, which say what the request waits for. What fails then is an event, as it has no status of its own."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from aiohttp import web

from pipeline.http_server.apis.table import family_of
from pipeline.stages.gateway.dialect import COMMENT
from pipeline.stages.gateway.errors import ApiError

BEGUN = web.RequestKey("begun stream", web.StreamResponse)
"""The response of a request, if it was begun early."""


class Waiting(NamedTuple):
    """What a request waits for."""

    model: str
    """Its name in the request."""
    words: Callable[[], str]
    """Returns what it waits for; an empty string if its model is loaded and awake."""


WAITING = web.RequestKey("waiting", Waiting)
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def wait_with_keep_alives(
    http_request: web.Request, ready: Awaitable[object], interval_s: float, waiting: Waiting
) -> None:
    """Wait, and after each `interval_s` say what the request waits for. Raises what `ready` raises."""
    task = asyncio.ensure_future(ready)
    try:
        while not (await asyncio.wait([task], timeout=interval_s))[0]:
            response = await begun(http_request)
            await response.write(_event(http_request, waiting.model, waiting.words()))
        await task
    finally:
        task.cancel()


def keep_alive_of(http_request: web.Request, keep_alive: bytes) -> bytes:
    """What a stream says while there is no output: `keep_alive`, after what it waits for if the model sleeps for
    others."""
    waiting = http_request.get(WAITING)
    if waiting is None or not (words := waiting.words()):
        return keep_alive
    return _event(http_request, waiting.model, words) + (b"" if keep_alive == COMMENT else keep_alive)


def _event(http_request: web.Request, model: str, words: str) -> bytes:
    return family_of(http_request.path).waiting(http_request.path, model, words, time.time())


async def begun(http_request: web.Request) -> web.StreamResponse:
    """The response, whose headers are sent."""
    if BEGUN not in http_request:
        media_type = family_of(http_request.path).media_type
        response = web.StreamResponse(headers={"Content-Type": media_type} | STREAM_HEADERS)
        await response.prepare(http_request)
        http_request.writer.send_headers()
        http_request[BEGUN] = response
    return http_request[BEGUN]


async def fail(http_request: web.Request, error: ApiError) -> web.StreamResponse:
    """End a stream that was begun early with an error."""
    fields = {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}
    response = http_request[BEGUN]
    await response.write_eof(family_of(http_request.path).lost_stream(fields))
    return response
