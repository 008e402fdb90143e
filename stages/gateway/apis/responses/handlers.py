"""The handlers of the routes below /v1/responses, and the tasks of background responses."""

import asyncio
import itertools
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web

from pipeline.config.settings import GatewaySettings
from pipeline.http_server.access.guard import current_scope
from pipeline.http_server.access_log import AccessLog
from pipeline.http_server.apis.responses import ResponsesFamily
from pipeline.http_server.bodies.body_reader import TURN_TIMEOUT_S, Rest
from pipeline.http_server.bodies.large_body_lock import LARGE_BYTES
from pipeline.runtime.queues.fair_gate import FairGate
from pipeline.runtime.security.client_address import client_address
from pipeline.stages.gateway.access_details import log_background, set_opened
from pipeline.stages.gateway.admin.abort_requests import RequestAborter
from pipeline.stages.gateway.apis.responses import reply
from pipeline.stages.gateway.apis.responses.body import renamed
from pipeline.stages.gateway.apis.responses.event_log import EventLog
from pipeline.stages.gateway.apis.responses.parsing import Referred, StoredSize, finish_response, read_response
from pipeline.stages.gateway.apis.responses.sizes import SizedItem, response_bytes, sum_of
from pipeline.stages.gateway.apis.responses.store import ResponseStore, StoredResponse
from pipeline.stages.gateway.apis.responses.types import (
    DEFAULT_LIMIT,
    MAX_LIMIT,
    MAX_NUMBER_DIGITS,
    MAX_PAGE_BYTES,
    ItemList,
    ResponseDeleted,
    ResponseObject,
)
from pipeline.stages.gateway.errors import ApiError, invalid, overloaded, shown, unsupported
from pipeline.stages.gateway.http import response_writer
from pipeline.stages.gateway.open_requests.request import Request
from pipeline.stages.gateway.open_requests.table import RequestTable
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest, RequestLimits
from pipeline.stages.gateway.received import RESPONSES, Parser, Received
from pipeline.stages.gateway.replies.part_turns import StreamTurns

END_TIMEOUT_S = 10.0
"""How long to wait for the tasks of requests that were aborted: only their responses are left to build."""
Read = Callable[[web.Request, str, Parser], Awaitable[tuple[ParsedRequest, Received]]]
"""Reads a request of an API, and parses its body. Raises ApiError."""


class ResponsesApi:
    """A method for each route below /v1/responses."""

    def __init__(self, read: Read, requests: RequestTable, aborter: RequestAborter, settings: GatewaySettings) -> None:
        self._read = read
        self._requests = requests
        self._aborter = aborter
        self._settings = settings
        self._store = ResponseStore(settings.max_stored_responses, settings.max_stored_response_bytes)
        self._max_stored = settings.max_stored_responses
        self._gate = FairGate(2, num_per_scope=1)
        """Of large replies that are encoded."""
        self.access_log: AccessLog | None = None
        self._why_off = ""
        self.rescaled(settings.replicas)
        self._tasks: set[asyncio.Task[None]] = set()

    def rescaled(self, num_gateways: int) -> None:
        """The server has this many gateways now. What was stored stays, and can be read again if there is only one."""
        self._why_off = ""
        if num_gateways > 1:
            self._why_off = "each gateway has its own memory, and there are several (gateway.replicas)"
        elif not self._max_stored:
            self._why_off = "responses are not stored (gateway.max_stored_responses = 0)"

    def has(self, response_id: str) -> bool:
        """Whether a response of this id is stored here, for whichever client."""
        return self._store.has(response_id)

    # -------------------------------------------------------------------------------------------------------- routes

    async def create_response(self, http_request: web.Request) -> web.StreamResponse:
        """Open a request and send its response. Unless it is in the background, it is aborted if the client
        disconnects."""
        max_bytes = min(self._store.max_bytes, self._requests.admission.max_request_bytes)
        stored = Stored(self._store, self._why_off, current_scope(), max_bytes)
        items: list[SizedItem] = []
        seed = secrets.token_hex(16)

        def parse(body: bytes, limits: RequestLimits) -> Rest[ParsedRequest]:
            read = read_response(body, limits, stored, seed)

            def finish() -> ParsedRequest:
                parsed = finish_response(read, limits, stored)
                if read.is_stored:
                    items.extend(parsed.items)
                return parsed.request

            return Rest(read.num_stored_bytes, finish)

        parsed, received = await self._read(http_request, RESPONSES, parse)
        received = msgspec.structs.replace(received, seed=seed, referred=stored.referred)
        request = self._requests.open(parsed, received)
        del parsed, received  # so that the request alone decides how long its prompts are kept
        fields, scope = reply.reply_fields_of(request.parsed), request.parsed.scope
        set_opened(http_request, request, in_background=fields.background)
        log = EventLog() if fields.background and request.parsed.stream else None
        if fields.store:  # `open` has counted the conversation, which is kept until the response is stored
            request.on_response = lambda response: self._store.put(StoredResponse(scope, response, items, events=log))
        if fields.background:
            queued = self._start(request, items, log, client_address(http_request.transport))
            if log is None:
                return await self._reply(queued, response_bytes(queued))
            return await self._send_log(http_request, log, 0, request.id)
        try:
            unread = self._requests.unread_output
            return await response_writer.send_reply(http_request, request, self._settings, unread)
        except ApiError as error:
            raise renamed(error) from error
        except ConnectionError:
            return web.Response()  # the client has disconnected
        finally:
            self._requests.release(request)

    async def get_response(self, http_request: web.Request) -> web.StreamResponse:
        stored = self._find(http_request)
        first = _first_event(http_request.query)
        if first is None:
            return await self._reply_now(stored)
        if stored.events is None:
            what = "only responses that were created with background = true and stream = true are streamed again"
            raise unsupported("stream", what)
        return await self._send_log(http_request, stored.events, first, stored.response.id)

    async def delete_response(self, http_request: web.Request) -> web.StreamResponse:
        stored = self._find(http_request)
        self._store.delete(stored.response.id)
        if stored.request is not None:
            stored.request.on_response = None
            await self._aborter.abort([stored.request.id], stored.scope)
        return _json(ResponseDeleted(stored.response.id))

    async def cancel_response(self, http_request: web.Request) -> web.StreamResponse:
        stored = self._find(http_request)
        response_id = stored.response.id
        if not stored.response.background:
            message = f"Response '{shown(response_id)}' can't be cancelled: it was not created with background = true."
            raise invalid("response_id", message, "invalid_value")
        if (request := stored.request) is not None:
            tasks = [task for task in self._tasks if task.get_name() == response_id]
            await self._aborter.abort([request.id], stored.scope)
            if tasks:
                await asyncio.wait(tasks, timeout=END_TIMEOUT_S)
        return await self._reply_now(self._find(http_request))

    async def list_input_items(self, http_request: web.Request) -> web.StreamResponse:
        items = list(self._find(http_request).items)
        query = http_request.query
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise invalid("order", "'order' must be asc or desc", "invalid_value")
        if order == "desc":
            items.reverse()
        text = query.get("limit", str(DEFAULT_LIMIT))
        if not (text.isascii() and text.isdecimal() and len(text) <= 3 and 1 <= int(text) <= MAX_LIMIT):
            raise invalid("limit", f"'limit' must be an integer from 1 to {MAX_LIMIT}", "invalid_value")
        if (after := query.get("after")) is not None:
            indices = [index for index, one in enumerate(items) if one.item.id == after]
            if not indices:
                raise invalid("after", f"'after' is '{shown(after)}', which is not an input item", "invalid_value")
            items = items[indices[0] + 1 :]
        page = [one.item for one in items[: _num_of_page(items, int(text))]]
        first, last = (page[0].id, page[-1].id) if page else (None, None)
        found = ItemList(data=page, first_id=first, last_id=last, has_more=len(page) < len(items))
        return await self._reply(found, sum_of(items[: len(page)]))

    async def _reply_now(self, stored: StoredResponse) -> web.Response:
        """A response as it is now."""
        response = stored.response
        if stored.request is not None and stored.request.has_begun:
            response = msgspec.structs.replace(response, status="in_progress")
        return await self._reply(response, response_bytes(response) + sum_of(stored.output))

    async def _reply(self, value: Any, num_bytes: int) -> web.Response:
        """A reply of about `num_bytes`. Large ones, which a client may ask for again and again, are encoded in a
        thread, for one request of a key at a time. Raises ApiError, 503, if others take too long."""
        if num_bytes <= LARGE_BYTES:
            return _json(value)
        scope = current_scope()
        try:
            async with asyncio.timeout(TURN_TIMEOUT_S):
                await self._gate.enter(scope, num_bytes)
        except TimeoutError:
            raise overloaded(f"other large replies were built for {TURN_TIMEOUT_S:g} s") from None
        try:
            return web.Response(body=await response_writer.encoded(value), content_type="application/json")
        finally:
            self._gate.leave(scope)

    def _find(self, http_request: web.Request) -> StoredResponse:
        """The response that the path names. Raises ApiError."""
        if self._why_off:
            raise unsupported("response_id", f"no response can be found: {self._why_off}")
        return self._store.get(http_request.match_info["response_id"], current_scope())

    # ---------------------------------------------------------------------------------------------------- background

    def _start(self, request: Request, items: list[SizedItem], log: EventLog | None, client: str) -> ResponseObject:
        """Run a request in the background, with its events in `log` if it is streamed. Returns its response now.
        `client` is the address that it came from."""
        response = reply.response_of(request, "queued", [])
        self._store.put(StoredResponse(request.parsed.scope, response, items, request, log))
        run = self._run(request) if log is None else self._run_stream(request, log)
        task = asyncio.get_running_loop().create_task(run, name=request.id)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if (access_log := self.access_log) is not None:
            task.add_done_callback(lambda _: log_background(access_log, request, ResponsesFamily.path, client))
        return response

    async def _run(self, request: Request) -> None:
        """Wait for a background request and store its response."""
        error: ApiError | None = ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "the server could not finish this request")
        try:
            await request.until(lambda: request.is_finished)
            request.log_output("whole", await response_writer.whole_body(request))
            error = None
        except ApiError as failure:
            error = failure
        finally:
            if error is not None:
                reply.failed(request, renamed(error), [])
            self._requests.release(request)

    async def _run_stream(self, request: Request, log: EventLog) -> None:
        """Write the events of a background request to its log, and store its response."""
        events = reply.ResponseEvents(request)
        error: ApiError | None = ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "the server could not finish this request")
        num_before = request.num_bytes
        turns = StreamTurns(request.parsed)

        async def due() -> bytes:
            await turns.take()
            return turns.run(events.due)

        try:
            log.append(events.first() + await due())
            while not events.are_over:
                self._requests.admission.keep(request, num_before + log.num_bytes)
                if events.has_more:
                    await asyncio.sleep(0)
                else:
                    await request.change()
                log.append(await due())
            log.append(await response_writer.last_events(request, events))
            error = None
        except ApiError as failure:
            error = failure
            log.append(events.due())
        finally:
            if error is not None:
                log.append(events.failed(error))
            log.close()
            self._requests.admission.count_log(log)
            self._requests.release(request)

    async def _send_log(
        self, http_request: web.Request, log: EventLog, first: int, response_id: str
    ) -> web.StreamResponse:
        """Send the events of a background response from the position `first` on. It goes on without the client."""
        admission, reader = self._requests.admission, object()
        log.readers.add(reader)
        admission.count_log(log)

        def stop() -> None:
            log.readers.discard(reader)
            admission.count_log(log)

        try:
            return await response_writer.send_log(
                http_request,
                log,
                first,
                response_id,
                self._settings.slow_client_timeout_s,
                self._settings.sse_keep_alive_s,
                self._requests.unread,
                lambda: self._requests.unread_output.waiting_log(http_request, log, stop),
            )
        except ConnectionError:
            return web.Response()  # the client has disconnected
        finally:
            stop()

    def cancel_background(self, error: ApiError) -> int:
        """End all background responses with an error: the server stops. Returns their number."""
        running = self._store.running()
        for stored in running:
            if stored.request is not None:
                stored.request.fail(error)
        return len(running)

    async def wait_closed(self) -> None:
        """Wait for the tasks of requests that have ended."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=END_TIMEOUT_S)


class Stored:
    """What a client may refer to."""

    def __init__(self, store: ResponseStore, why_off: str, scope: str, max_bytes: int) -> None:
        """`max_bytes`: what a request may take from it."""
        self._store = store
        self._max_bytes = max_bytes
        self.is_on = not why_off
        self.why_off = why_off
        self._scope = scope
        self.referred = Referred(self.is_on)
        """What was asked for."""

    def size(self, response_id: str) -> StoredSize:
        stored = self._complete(response_id)
        return StoredSize(stored.conversation_bytes, stored.num_parts)

    def conversation(self, response_id: str) -> list[SizedItem]:
        self.referred.before = self._complete(response_id).conversation
        return self.referred.before

    def _complete(self, response_id: str) -> StoredResponse:
        try:
            stored = self._store.get(response_id, self._scope)
        except ApiError:
            message = f"Previous response with id '{shown(response_id)}' not found."
            raise ApiError(
                HTTPStatus.BAD_REQUEST, message, "previous_response_id", code="previous_response_not_found"
            ) from None
        if stored.is_running:
            message = f"Previous response with id '{shown(response_id)}' is not finished."
            raise invalid("previous_response_id", message, "invalid_value")
        return stored

    def item(self, param: str, item_id: str) -> SizedItem:
        if not self.is_on:
            raise unsupported(param, self.why_off)
        self.referred.items[item_id] = found = self._store.item(param, item_id, self._scope)
        return found

    def check_size(self, param: str, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            message = (
                f"'{param}': the stored items that this request refers to, each as often as it does, have {num_bytes} "
                f"bytes in memory up to this one, and the limit is {self._max_bytes}, the smaller of "
                "gateway.max_stored_response_bytes and three quarters of gateway.max_open_bytes"
            )
            raise invalid(param, message, "request_too_large")


def _first_event(query: Mapping[str, str]) -> int | None:
    """The position of the first event that a client asks for, or None if it asks for the response. Raises ApiError."""
    stream, after = query.get("stream", "false").lower(), query.get("starting_after")
    if stream not in ("true", "false"):
        raise invalid("stream", "'stream' must be true or false", "invalid_value")
    if after is None:
        return 0 if stream == "true" else None
    if stream == "false":
        raise invalid("starting_after", "'starting_after' is only allowed together with stream = true")
    if not (after.isascii() and after.isdecimal() and len(after) <= MAX_NUMBER_DIGITS):
        raise invalid("starting_after", "'starting_after' must be the sequence_number of an event", "invalid_value")
    return int(after) + 1


def _num_of_page(items: Sequence[SizedItem], limit: int) -> int:
    """How many of the items a page has: `limit`, or fewer if they are large."""
    sums = itertools.accumulate(one.num_bytes for one in items[:limit])
    return max(1, sum(num_bytes <= MAX_PAGE_BYTES for num_bytes in sums))


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
