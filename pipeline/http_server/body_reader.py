"""Reads and parses request bodies, within limits of size, time and memory."""

import asyncio
import contextlib
import contextvars
import math
from collections.abc import Callable
from contextlib import AsyncExitStack
from http import HTTPStatus
from typing import TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from pipeline.http_server.errors import ENCODINGS, ApiError, overloaded, shown, unsupported_encoding
from pipeline.http_server.guard import current_scope
from pipeline.http_server.json_depth import check_depth
from pipeline.http_server.large_body_lock import LARGE_BYTES, LargeBodyLock
from pipeline.http_server.upload_budget import MIN_BYTES_PER_S, Upload, UploadBudget
from pipeline.runtime.work_pool import WorkPool

BODY_TIMEOUT_S = 60.0
"""Time for a client to send the body."""
TURN_TIMEOUT_S = 60.0
"""Time for a large body to wait until it is parsed."""

T = TypeVar("T")


class MuchWork(Exception):
    """A parser in the event loop has found that a small body makes much work, such as a large body of `num_bytes`."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self.num_bytes = num_bytes


def leave_loop(num_bytes: int) -> None:
    """Call it in a parser before much work. In the event loop it raises MuchWork, and the parser is called again in
    the thread, where this does nothing."""
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        raise MuchWork(num_bytes)


class BodyTimeout(ApiError):
    """408"""


class OutOfTime(BodyTimeout):
    """The time of the whole request has passed before its body was parsed."""


class BodyReader:
    """Reads the bodies of one gateway's requests."""

    def __init__(self, max_body_bytes: int, max_json_depth: int) -> None:
        self._max_body = max_body_bytes
        self._max_depth = max_json_depth
        self._uploads = UploadBudget(max_body_bytes)
        self._large_body_lock = LargeBodyLock()
        self._thread = WorkPool("parse")
        """The lock bounds what waits for it."""

    def check_declared(self, http_request: web.Request) -> None:
        """Check the declared length, if there is one. Raises ApiError: 413 for a body that is too large, 503 if there
        is no room for it."""
        declared = http_request.content_length or 0
        if declared > self._max_body:
            raise self._too_large()
        self._uploads.check_room(declared, current_scope())

    async def parse(
        self,
        http_request: web.Request,
        parser: Callable[[bytes], T],
        timeout_s: float = BODY_TIMEOUT_S,
        left_s: float = math.inf,
    ) -> T:
        """Read the body within `timeout_s` and parse it. Its bytes count against the upload budget until it is parsed.
        Reading it, and the wait until it is parsed, end when the request's own time has passed, in `left_s`. `parser`
        may raise MuchWork (`leave_loop`) to be called again in the thread of large bodies. Raises BodyTimeout,
        OutOfTime, or another ApiError."""
        now_s = asyncio.get_running_loop().time
        end_s = now_s() + left_s
        if (encoding := http_request.headers.get("Content-Encoding", "").lower() or "identity") not in ENCODINGS:
            raise unsupported_encoding(encoding)
        self.check_declared(http_request)
        scope, turn_end_s = current_scope(), math.inf
        deadline, turn = asyncio.timeout(min(timeout_s, left_s)), asyncio.timeout(None)
        upload = self._uploads.upload(stop=lambda: _end_now(turn if upload.is_complete else deadline), scope=scope)
        try:
            async with deadline:
                body = await self._read(http_request, upload)
            upload.complete()
            size = len(body)
            if size <= LARGE_BYTES:
                try:
                    return self._parsed(body, parser)
                except MuchWork as found:
                    size = found.num_bytes
            async with AsyncExitStack() as stack:
                async with turn:
                    turn.reschedule(turn_end_s := min(now_s() + TURN_TIMEOUT_S, end_s))
                    await stack.enter_async_context(self._large_body_lock.hold(size, scope))
                return await self._in_thread(lambda: self._parsed(body, parser))
        except TimeoutError:
            if upload.why_given_up == "slow":
                raise _too_slow() from None
            if upload.why_given_up == "share":
                raise overloaded("clients with other API keys needed the room of this body") from None
            if turn_end_s == end_s if upload.is_complete else left_s < timeout_s:
                raise OutOfTime(HTTPStatus.REQUEST_TIMEOUT, "the request's time passed before it was parsed") from None
            if upload.is_complete:
                raise overloaded(f"other large bodies were parsed for {TURN_TIMEOUT_S:g} s") from None
            raise BodyTimeout(HTTPStatus.REQUEST_TIMEOUT, f"the body did not arrive within {timeout_s:g} s") from None
        except web.RequestPayloadError as error:
            cause = error.__cause__
            reason = cause.message if isinstance(cause, HttpProcessingError) else str(error)
            raise ApiError(HTTPStatus.BAD_REQUEST, f"cannot read the body: {shown(reason)}") from error
        finally:
            upload.release()

    def _parsed(self, body: bytes, parser: Callable[[bytes], T]) -> T:
        check_depth(body, self._max_depth)
        return parser(body)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run the parser of a large body in the thread, so that the event loop serves other clients meanwhile. Returns
        only when the thread has ended its work, also if the client has disconnected: the next large body waits."""
        task = asyncio.ensure_future(self._thread.run(contextvars.copy_context().run, work))
        try:
            return await asyncio.shield(task)
        finally:
            if not task.done():
                await asyncio.wait([task])

    async def _read(self, http_request: web.Request, upload: Upload) -> bytes:
        """Like aiohttp's own `read`, but reports progress and does not keep the bytes with the request."""
        body = bytearray()
        while chunk := await http_request.content.readany():
            if len(body) + len(chunk) > self._max_body:
                raise self._too_large()
            upload.grow(len(body) + len(chunk))
            body += chunk
        return bytes(body)

    def _too_large(self) -> ApiError:
        message = f"the body is larger than {self._max_body} bytes"
        return ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, code="body_too_large")


def _end_now(deadline: asyncio.Timeout) -> None:
    with contextlib.suppress(RuntimeError):  # it has passed already
        deadline.reschedule(0.0)


def _too_slow() -> ApiError:
    message = f"the body arrived slower than {MIN_BYTES_PER_S} bytes per second while other clients needed its room"
    return ApiError(HTTPStatus.REQUEST_TIMEOUT, message)
