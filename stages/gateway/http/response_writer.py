"""Sends responses.

    Sequence.pending ──events, if there is room──► transport, HIGH_BYTES at most ──► kernel ──► client

If a client keeps up, its events are written as soon as their output arrives, and its task sleeps. If more than
HIGH_BYTES are buffered in the transport, the task waits until they are sent; meanwhile its output stays in its request,
bounded by the longest sequence, and is merged into one event. So a slow client delays its own task only. A client that
reads nothing for `gateway.slow_client_timeout_s`, or at most twice that, is disconnected, and its request is aborted;
one that reads too slowly while others need its room, too (stages/gateway/admission/unread.py).
When a response is complete, the kernel has all of it.
"""

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import msgspec
from aiohttp import web

from pipeline.config.settings import GatewaySettings
from pipeline.http_server.sockets.slow_clients import (
    HIGH_BYTES,
    PIECE_BYTES,
    SlowClientTimeout,
    UnreadReplies,
    flushed,
    send,
    sent_at_once,
    write,
)
from pipeline.runtime.queues.work_pool import WorkPool
from pipeline.runtime.resume_points import RESUMABLE
from pipeline.runtime.security.client_address import client_address
from pipeline.stages.gateway.admission.unread import UnreadOutput
from pipeline.stages.gateway.apis.responses.event_log import EventLog
from pipeline.stages.gateway.dialect import COMMENT, EVENT_STREAM, ReplyEvents
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.http.early_stream import BEGUN, STREAM_HEADERS, keep_alive_of
from pipeline.stages.gateway.http.keep_alive import KeepAlive
from pipeline.stages.gateway.open_requests.request import Request
from pipeline.stages.gateway.replies.part_turns import StreamTurns
from pipeline.stages.gateway.replies.resume_points import Continuation, ResumePoints
from pipeline.stages.gateway.replies.token_details import MAX_ENTRIES_AT_ONCE

HEADERS_AFTER_S = 1.0
"""A stream's headers are sent this long after its prompts were accepted, even if there is no output. Before that an
error gets its own HTTP status; after that the client, and proxies, see that the request is alive."""

_NOT_IN_WARNING = re.compile(r"[^A-Za-z0-9_.:/-]")
_replies = WorkPool("building large replies", max_threads=2)
"""Open requests bound what waits."""

LARGE_BYTES = 64 * 1024
"""Size of token outputs, or of what the request keeps for its reply, from which building it takes more than about 5
ms."""
LARGE_CHARS = 10_000
"""Text from which parsing it for calls and reasoning may take more than about 5 ms."""


class Backlog:
    """Notes since when the output of a stream waits for its client, from the first write on that the client has not
    taken when there is more."""

    def __init__(self, http_request: web.BaseRequest, waiting: Callable[[], AbstractContextManager[None]]) -> None:
        """`waiting` makes the note."""
        self._http_request = http_request
        self._waiting = waiting
        self._stack = contextlib.ExitStack()
        self._is_on = False

    def __enter__(self) -> "Backlog":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def begin(self, *, is_rest: bool) -> None:
        """Something will be written. `is_rest`: it was there when the last write began, and waited for that."""
        transport = self._http_request.transport
        if not is_rest and transport is not None and not transport.get_write_buffer_size():
            self.end()
        if not self._is_on:
            self._stack.enter_context(self._waiting())
            self._is_on = True

    def end(self) -> None:
        """The client has taken everything. Idempotent."""
        self._is_on = False
        self._stack.close()


async def send_reply(
    http_request: web.Request,
    request: Request,
    settings: GatewaySettings,
    unread: UnreadOutput,
    body_of: Callable[[Request], bytes] | None = None,
) -> web.StreamResponse:
    """Send the events of a request, or its whole response (see below)."""
    timeout_s = settings.slow_client_timeout_s
    if request.parsed.stream:
        return await send_stream(http_request, request, timeout_s, settings.sse_keep_alive_s, unread)
    return await send_whole(http_request, request, timeout_s, unread, body_of)


async def send_whole(
    http_request: web.Request,
    request: Request,
    timeout_s: float,
    unread: UnreadOutput,
    body_of: Callable[[Request], bytes] | None = None,
) -> web.StreamResponse:
    """Wait until a request has finished and send its response, from `body_of` or in the shape of its route. The client
    may lose it in `unread`. Raises ApiError if it fails, ConnectionError as `send`."""
    await request.until(lambda: request.is_finished)
    body = body_of(request) if body_of is not None else request.log_output("whole", await whole_body(request))
    response = web.Response(body=body, content_type="application/json", headers=_headers(request))
    if not await sent_at_once(http_request, response):
        with unread.waiting(http_request, request):
            await send(http_request, response, timeout_s)
    return response


async def encoded(value: Any) -> bytes:
    """A large value as JSON, built in a thread. It must not change meanwhile."""
    return await _replies.run(msgspec.json.encode, value)


async def whole_body(request: Request) -> bytes:
    """The body of a finished request. Raises ApiError if there is none. Large bodies are built in a thread: a finished
    request does not change any more."""
    build = request.parsed.dialect.whole
    return await _replies.run(build, request) if _is_large(request) else build(request)


async def pooled_result(request: Request) -> bytes:
    """What the model's pooler made of a finished request, over ZeroMQ. The numbers of a long text's tokens are made in
    a thread, too: they are millions."""
    build = request.parsed.dialect.result
    is_large = request.parsed.is_pooled and _is_large(request)
    return await _replies.run(build, request) if is_large else build(request)


def _is_large(request: Request) -> bool:
    """Whether to build the body in a thread, so that the event loop is not blocked: it is long, or what it repeats or
    stores of the request is."""
    size = sum(len(one.token_outputs) for one in request.sequences) + sum(
        len(one.prompt_logprobs) * one.submit.options.n for one in request.prompt_requests
    )
    num_parsed = sum(one.num_chars for one in request.choices) if request.parsed.reply is not None else 0
    return size > LARGE_BYTES or num_parsed > LARGE_CHARS or request.num_bytes > LARGE_BYTES


async def last_events(request: Request, events: ReplyEvents) -> bytes:
    """The end of a stream that has not failed. Built in a thread if it repeats a large output, or stores a large
    conversation."""
    num_entries = (1 + max(0, request.parsed.options.num_logprobs)) * request.num_output_tokens
    is_large = num_entries > MAX_ENTRIES_AT_ONCE or request.num_bytes > LARGE_BYTES
    if request.parsed.dialect.ends_with_output and is_large:
        return request.log_output("last", await _replies.run(events.ended))
    return events.last()


async def send_stream(
    http_request: web.Request, request: Request, timeout_s: float, keep_alive_s: float, unread: UnreadOutput
) -> web.StreamResponse:
    """Send the events of a request as its output arrives, with a keep-alive in each silence of `keep_alive_s` (0:
    never). The client may lose it in `unread`. Raises ApiError if it fails before the headers are sent; later errors
    are events. Raises ConnectionError as `send`."""
    await _begun(request)
    dialect = request.parsed.dialect
    headers = {"Content-Type": dialect.media_type} | STREAM_HEADERS | _headers(request)
    response = http_request.get(BEGUN) or web.StreamResponse(headers=headers)
    events = dialect.events(request)
    points = ResumePoints(request) if request.parsed.has_resume_points else None
    if points is not None:
        response.headers[RESUMABLE] = "1"
    is_continued = request.parsed.resumption is not None
    if is_continued:
        continuation = Continuation(request)
        await request.until(lambda: request.is_accepted or request.is_finished)
        continuation.check_prompt()
        await request.until(lambda: continuation.is_decided)
        continuation.check_text()
        continuation.run(events)

    turns = StreamTurns(request.parsed, client_address(http_request.transport))

    def due(data: bytes = b"") -> bytes:
        data += turns.run(events.due)
        return data if points is None else data + points.after(data, has_more=events.has_more)

    def push() -> bool:
        """Write events at once, unless the client is slow, or many streams have much to write."""
        transport = http_request.transport
        if transport is None or transport.is_closing() or transport.get_write_buffer_size() or not turns.has_time:
            return False
        backlog.end()
        if data := due():
            _write(http_request, response, data)
        return not (events.has_more or events.are_over)

    with (
        SlowClientTimeout(http_request, timeout_s),
        Backlog(http_request, lambda: unread.waiting(http_request, request)) as backlog,
    ):
        if BEGUN not in http_request:
            await response.prepare(http_request)
            http_request.writer.send_headers()
        is_rest = False
        await turns.take()
        data = due(b"" if is_continued else events.first())
        with KeepAlive(
            http_request,
            keep_alive_s,
            lambda: _write(http_request, response, keep_alive_of(http_request, dialect.keep_alive)),
        ) as keep_alive:
            while not events.are_over:
                if data:
                    backlog.begin(is_rest=is_rest)
                    await _write_all(http_request, response, data, keep_alive)
                try:
                    if is_rest := events.has_more:
                        await asyncio.sleep(0)
                    else:
                        await request.change(push)
                    await turns.take()
                except ApiError as error:
                    data = due() + (b"" if points is None else points.failed(error)) + events.failed(error)
                    break
                data = due()
            else:
                data += await last_events(request, events)
            backlog.begin(is_rest=True)
            if len(data) > HIGH_BYTES:
                await _write_all(http_request, response, data, keep_alive)
                data = b""
        await response.write_eof(data)
        await flushed(http_request)
    return response


async def send_log(
    http_request: web.Request,
    log: EventLog,
    first: int,
    request_id: str,
    timeout_s: float,
    keep_alive_s: float,
    unread: UnreadReplies,
    waiting: Callable[[], AbstractContextManager[None]],
) -> web.StreamResponse:
    """Send the events of a background response from the position `first` on, as they arrive, with keep-alives as
    `send_stream`; only the headers if the method is HEAD. What the client does not take counts in `unread`,
    besides the log, and `waiting` notes since when. Raises ConnectionError as `send`."""
    headers = {"Content-Type": EVENT_STREAM, "X-Request-Id": request_id} | STREAM_HEADERS
    response = web.StreamResponse(headers=headers)
    if http_request.method == "HEAD":
        await send(http_request, response, timeout_s)
        return response
    with SlowClientTimeout(http_request, timeout_s), Backlog(http_request, waiting) as backlog:
        await response.prepare(http_request)
        http_request.writer.send_headers()
        is_rest = False
        with KeepAlive(
            http_request, keep_alive_s, lambda: _write(http_request, response, keep_alive_of(http_request, COMMENT))
        ) as keep_alive:
            while first < len(log) or not log.is_over:
                data, first = log.read(first)
                if data:
                    backlog.begin(is_rest=is_rest)
                    is_rest = first < len(log)
                    # A large event is the log's own, which `count_log` counts: only a piece of it is copied.
                    with unread.counted(http_request, min(len(data), HIGH_BYTES + PIECE_BYTES)):
                        await _write_all(http_request, response, data, keep_alive)
                else:
                    await log.more(first)
        backlog.begin(is_rest=True)
        await response.write_eof()
        await flushed(http_request)
    return response


async def _write_all(
    http_request: web.Request, response: web.StreamResponse, data: bytes, keep_alive: KeepAlive
) -> None:
    """Write events, with no keep-alive between the pieces of one."""
    keep_alive.is_in_event = True
    await write(http_request, response, data)
    keep_alive.is_in_event = False


def _write(http_request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    """Write a part of the body without waiting, in one piece. The headers have been sent."""
    if "Transfer-Encoding" in response.headers:
        data = b"%x\r\n%b\r\n" % (len(data), data)
    assert http_request.transport is not None
    http_request.transport.write(data)
    http_request.writer.output_size += len(data)


async def _begun(request: Request) -> None:
    """Wait until the headers can be sent. A reply that begins with the prompts, their ids or their number needs these
    first."""
    parsed = request.parsed
    needs_prompt = (
        parsed.echo or parsed.details.with_ids or parsed.dialect.begins_with_usage or parsed.has_resume_points
    )
    await request.until(lambda: request.is_accepted or (request.has_begun and not needs_prompt) or request.is_finished)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(HEADERS_AFTER_S):
            await request.until(lambda: request.has_begun or request.is_finished)


def _headers(request: Request) -> dict[str, str]:
    headers = {"X-Request-Id": request.id} | request.parsed.dialect.headers(request)
    if request.parsed.left_out:
        headers["Warning"] = _left_out_warning(request.parsed.left_out)
    return headers


def _left_out_warning(types: Iterable[str]) -> str:
    """The value of a `Warning` header (RFC 7234, section 5.5) about tools that the model did not get. The client has
    chosen the types, so only letters, digits and a few signs of them are shown."""
    shown = ", ".join(_NOT_IN_WARNING.sub("?", one) for one in types)
    return f'299 - "tools that only their provider runs were left out: {shown}"'
