"""Reads and parses request bodies, within limits of size, time and memory."""

import asyncio
import contextlib
import contextvars
import math
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from http import HTTPStatus
from typing import Generic, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from pipeline.config.settings import GatewaySettings as GatewaySettings
from pipeline.config.settings import LimitSettings as LimitSettings
from pipeline.http_server.access.guard import current_scope
from pipeline.http_server.bodies.image_data import num_other_bytes
from pipeline.http_server.bodies.json_depth import MAX_WIDE_BYTES, check_depth, check_large
from pipeline.http_server.bodies.large_body_lock import LARGE_BYTES, LargeBodyLock
from pipeline.http_server.bodies.upload_budget import MIN_BYTES_PER_S, NUM_MEDIA_BODIES, Upload, UploadBudget
from pipeline.http_server.errors import ENCODINGS, ApiError, overloaded, shown, unsupported_encoding
from pipeline.runtime.queues.work_pool import WorkPool

BODY_TIMEOUT_S = 60.0
"""Time for a client to send the body."""
TURN_TIMEOUT_S = 60.0
"""Time for a large body to wait until it is parsed."""

KEPT_BODY = web.RequestKey("kept body", bytes)
"""Of a request whose body was read to find the model that it is for."""

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class Rest(Generic[T]):
    """What a parser returns if it has read its body and has to work on what the server stores, too: a small body may
    name much of that."""

    num_bytes: int
    """Size of what is stored."""
    finish: Callable[[], T]
    """Do the rest."""

    def then(self, work: Callable[[T], U]) -> "Rest[U]":
        """The rest, and more after it."""
        return Rest(self.num_bytes, lambda: work(self.finish()))


class BodyTimeout(ApiError):
    """408"""


class OutOfTime(BodyTimeout):
    """The time of the whole request has passed before its body was parsed."""


class BodyReader:
    """Reads the bodies of one gateway's requests."""

    def __init__(
        self,
        max_body_bytes: int,
        max_json_depth: int,
        max_media_body_bytes: int = 0,
        max_wide_bytes: int = MAX_WIDE_BYTES,
    ) -> None:
        """`max_media_body_bytes` is the limit of bodies that may have images, if it is larger; what is not base64 in
        them is bounded by `max_body_bytes`. `max_wide_bytes` is that of a string that is not plain ASCII."""
        self._max_body = max_body_bytes
        self._max_media_body = max(max_body_bytes, max_media_body_bytes)
        self._max_depth = max_json_depth
        self._max_wide = max_wide_bytes
        self._uploads = UploadBudget(max_body_bytes)
        self._media_uploads = UploadBudget(self._max_media_body, NUM_MEDIA_BODIES)
        """Of bodies above `max_body_bytes`, so that photos leave the room of texts alone."""
        self._large_body_lock = LargeBodyLock()
        self._thread = WorkPool("parse")
        """The lock bounds what waits for it."""

    @classmethod
    def of_settings(cls, gateway: GatewaySettings, limits: LimitSettings) -> "BodyReader":
        """A prompt's texts may be written with escapes, which take up to three times their size."""
        max_wide_bytes = max(MAX_WIDE_BYTES, 3 * limits.max_prompt_bytes)
        return cls(gateway.max_body_bytes, limits.max_json_depth, gateway.max_media_body_bytes, max_wide_bytes)

    def check_declared(self, http_request: web.Request, *, takes_images: bool = False) -> None:
        """Check the declared length, if there is one. `takes_images`: the body may have images. Raises ApiError: 413
        for a body that is too large, 503 if there is no room for it."""
        declared = http_request.content_length or 0
        if declared > (most := self._most_bytes(http_request, takes_images)):
            raise self._too_large(most)
        self._budget_of(declared).check_room(declared, current_scope())

    def _most_bytes(self, http_request: web.Request, takes_images: bool) -> int:
        """The limit of a body. A compressed one has no more than without images: they don't become smaller, and what a
        few bytes may grow to stays small."""
        return self._max_media_body if takes_images and _encoding_of(http_request) == "identity" else self._max_body

    def _budget_of(self, num_bytes: int) -> UploadBudget:
        return self._uploads if num_bytes <= self._max_body else self._media_uploads

    async def parse(
        self,
        http_request: web.Request,
        parser: Callable[[bytes], T | Rest[T]],
        timeout_s: float = BODY_TIMEOUT_S,
        left_s: float = math.inf,
        *,
        takes_images: bool = False,
        json_at: int = 0,
    ) -> T:
        """Read the body within `timeout_s` and parse it. Its bytes count against the upload budget until it is parsed.
        A large body, and work on much that is stored, wait for their turn and have a thread. Reading the body, and the
        waits, end when the request's own time has passed, in `left_s`. `takes_images` is as in `check_declared`.
        `json_at` is where the body's JSON begins; the parser checks what is in front of it. Raises BodyTimeout,
        OutOfTime, or another ApiError."""
        if (encoding := _encoding_of(http_request)) not in ENCODINGS:
            raise unsupported_encoding(encoding)
        self.check_declared(http_request, takes_images=takes_images)
        most = self._most_bytes(http_request, takes_images)
        if (body := self._arrived(http_request)) is not None:
            if len(body) > most:
                raise self._too_large(most)
            if len(body) <= LARGE_BYTES:
                parsed = self.parse_now(body, parser, json_at)
                if not isinstance(parsed, Rest):
                    return parsed
                return await self._parse_in_time(http_request, parser, timeout_s, left_s, most, json_at, body, parsed)
        return await self._parse_in_time(http_request, parser, timeout_s, left_s, most, json_at, body)

    async def _parse_in_time(
        self,
        http_request: web.Request,
        parser: Callable[[bytes], T | Rest[T]],
        timeout_s: float,
        left_s: float,
        most_bytes: int,
        json_at: int,
        body: bytes | None,
        parsed: Rest[T] | None = None,
    ) -> T:
        """`parse` where something has to be waited for: `body`, if it has not arrived, which has `most_bytes`, or the
        turn to parse it, or to do the rest of what is `parsed`."""
        now_s = asyncio.get_running_loop().time
        end_s = now_s() + left_s
        scope, turn_end_s = current_scope(), math.inf
        deadline, turn = asyncio.timeout(min(timeout_s, left_s)), asyncio.timeout(None)

        async def in_turn(num_bytes: int, work: Callable[[], U]) -> U:
            nonlocal turn, turn_end_s
            turn = asyncio.timeout_at(turn_end_s := min(now_s() + TURN_TIMEOUT_S, end_s))
            async with AsyncExitStack() as stack:
                async with turn:
                    mine = await stack.enter_async_context(self._large_body_lock.hold(num_bytes, scope))
                # To its end, also if the client has disconnected: the next large body waits for it.
                return await self._thread.run_to_end(contextvars.copy_context().run, mine.run, work)

        budget = self._budget_of(http_request.content_length or 0)
        upload = budget.upload(stop=lambda: _end_now(turn if upload.is_complete else deadline), scope=scope)
        try:
            if body is None:
                async with deadline:
                    body = await self._read(http_request, upload, most_bytes)
            upload.complete()
            found: T | Rest[T]
            if parsed is not None:
                found = parsed
            elif len(body) <= LARGE_BYTES:
                found = self.parse_now(body, parser, json_at)
            else:
                found = await in_turn(len(body), lambda: self._parsed(body, parser, LARGE_BYTES, json_at))
            if isinstance(found, Rest):
                return await in_turn(len(body) + found.num_bytes, found.finish)
            return found
        except TimeoutError:
            if upload.why_given_up == "slow":
                raise _too_slow() from None
            if upload.why_given_up == "share":
                raise overloaded("clients with other API keys needed the room of this body", by_size=True) from None
            if turn_end_s == end_s if upload.is_complete else left_s < timeout_s:
                raise OutOfTime(HTTPStatus.REQUEST_TIMEOUT, "the request's time passed before it was parsed") from None
            if upload.is_complete:
                raise overloaded(f"other large bodies were parsed for {TURN_TIMEOUT_S:g} s", by_size=True) from None
            raise BodyTimeout(HTTPStatus.REQUEST_TIMEOUT, f"the body did not arrive within {timeout_s:g} s") from None
        except web.RequestPayloadError as error:
            cause = error.__cause__
            reason = cause.message if isinstance(cause, HttpProcessingError) else str(error)
            raise ApiError(HTTPStatus.BAD_REQUEST, f"cannot read the body: {shown(reason)}") from error
        finally:
            upload.release()

    def parse_now(self, body: bytes, parser: Callable[[bytes], T | Rest[T]], json_at: int = 0) -> T | Rest[T]:
        """What is done in the loop with a body that is not large."""
        return self._parsed(body, parser, LARGE_BYTES - len(body), json_at)

    def _parsed(self, body: bytes, parser: Callable[[bytes], T | Rest[T]], num_more: int, json_at: int) -> T | Rest[T]:
        """Parse a body, with its rest if that is no more than `num_more` bytes."""
        if len(body) > self._max_body:
            self.check_beside_images(num_other_bytes(body))
        if len(body) > LARGE_BYTES:
            check_large(body, self._max_depth, self._max_wide, json_at)
        else:
            check_depth(body[json_at:], self._max_depth)
        parsed = parser(body)
        return parsed.finish() if isinstance(parsed, Rest) and parsed.num_bytes <= num_more else parsed

    def _arrived(self, http_request: web.Request) -> bytes | None:
        """A small body that has arrived as a whole, as nearly all have with their heads: nothing is waited for."""
        if (kept := http_request.get(KEPT_BODY)) is not None:
            del http_request[KEPT_BODY]  # nothing counts it
            return bytes(kept)
        content = http_request.content
        if not content.is_eof() or content.exception() is not None:
            return None
        if content.total_bytes > min(LARGE_BYTES, self._max_body):
            return None
        return content.read_nowait()

    async def _read(self, http_request: web.Request, upload: Upload, most_bytes: int) -> bytes:
        """Like aiohttp's own `read`, but reports progress and does not keep the bytes with the request."""
        body = bytearray()
        while chunk := await http_request.content.readany():
            if (num_bytes := len(body) + len(chunk)) > most_bytes:
                raise self._too_large(most_bytes)
            if len(body) <= self._max_body < num_bytes:
                upload.change_budget(self._media_uploads)
            upload.grow(num_bytes)
            body += chunk
        return bytes(body)

    def check_beside_images(self, num_bytes: int) -> None:
        """Check what a body has besides images. Raises ApiError, 413."""
        if num_bytes > self._max_body:
            message = (
                f"the body has {num_bytes} bytes that are not base64 of images, and the limit is {self._max_body} "
                "(gateway.max_body_bytes)"
            )
            raise ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, code="body_too_large")

    def _too_large(self, most_bytes: int) -> ApiError:
        setting = "max_body_bytes" if most_bytes == self._max_body else "max_media_body_bytes"
        message = f"the body is larger than {most_bytes} bytes (gateway.{setting})"
        return ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, code="body_too_large")


def _encoding_of(http_request: web.Request) -> str:
    return http_request.headers.get("Content-Encoding", "").lower() or "identity"


def _end_now(deadline: asyncio.Timeout) -> None:
    with contextlib.suppress(RuntimeError):  # it has passed already
        deadline.reschedule(0.0)


def _too_slow() -> ApiError:
    message = f"the body arrived slower than {MIN_BYTES_PER_S} bytes per second while other clients needed its room"
    return ApiError(HTTPStatus.REQUEST_TIMEOUT, message)
