"""Logs requests that are refused before they are opened: bad JSON, an invalid field, a wrong path, a missing key.

An opened request that a stage refuses has a line `rejected` already, and requests with 503 share one. A line says which
field is wrong and never what the client wrote into it. A client may send bad requests as fast as it can, so the number
of lines in a second is bounded; the rest are counted.
"""

import logging
import re
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from pipeline.http_server import request_ids
from pipeline.http_server.error_responses import ERROR, REQUEST_ID, id_in_headers
from pipeline.http_server.errors import ApiError, truncated
from pipeline.runtime.log.limited_log import LimitedLog

REJECTED, FAILED = "rejected", "failed"
_REST = {REJECTED: "rejected more requests", FAILED: "more requests failed"}
"""Messages of the lines with the numbers of those that were left out."""

Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_FIELD = re.compile(r"\w{1,64}", re.ASCII)
"""The first part of an error's `param`. The others may be keys that the client chose."""


class RejectionLog:
    """Logs refused requests, and those that failed because of a fault of this program: at most MAX_LINES of each in
    INTERVAL_S."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = LimitedLog(log, clock, _REST.__getitem__)

    def wrap(self, handle: Handle) -> Handle:
        """Wrap `handle`, which is outside of all routes and checks: log the errors that it answers with."""

        async def logged(request: web.BaseRequest) -> web.StreamResponse:
            response = await handle(request)
            error = response.get(ERROR)
            if error is not None and error.status != HTTPStatus.SERVICE_UNAVAILABLE and REQUEST_ID not in request:
                self._add(request, response, error)
            return response

        return logged

    def has_room_for_failure(self) -> bool:
        """Whether the traceback of a request may be logged; else it is counted. A client that has found a fault may
        repeat the request as fast as it can."""
        return self._log.has_room(logging.ERROR, FAILED)

    def flush(self) -> None:
        """As `LimitedLog.flush`."""
        self._log.flush()

    def _add(self, request: web.BaseRequest, response: web.StreamResponse, error: ApiError) -> None:
        if not self._log.has_room(logging.INFO, REJECTED):
            return
        fields: dict[str, object] = {"status": error.status}
        if error.code is not None:
            fields["code"] = error.code
        if error.param and (match := _FIELD.match(error.param)):
            fields["param"] = match[0]
        fields |= {"method": truncated(request.method), "path": truncated(request.rel_url.raw_path)}
        request_id = id_in_headers(request, response) or request_ids.to_repeat(request.headers)
        if request_id is not None:
            fields["response_id"] = request_id
        self._log.write(logging.INFO, REJECTED, **fields)


class _IgnoreClientErrors(logging.Filter):
    """Drops log records of what clients get an error for."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and is_of_client(record.exc_info[1]))


def is_of_client(error: object) -> bool:
    """Whether a request is not valid HTTP, or can't be decompressed."""
    return isinstance(error, HttpProcessingError | web.RequestPayloadError)


def http_log() -> logging.Logger:
    """What aiohttp logs to."""
    log = logging.getLogger("pipeline.http")
    if not log.filters:
        log.addFilter(_IgnoreClientErrors())
    return log
