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

MAX_LINES = 20
"""Lines in one interval, and tracebacks, besides the lines with the numbers of the others."""
INTERVAL_S = 1.0

Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_FIELD = re.compile(r"\w{1,64}", re.ASCII)
"""The first part of an error's `param`. The others may be keys that the client chose."""


class _Lines:
    """Lines of one kind in the current interval."""

    def __init__(self, rest: str, level: int) -> None:
        """`rest` is the message of the line with the number of those that were left out."""
        self._rest, self._level = rest, level
        self._num, self._num_left_out = 0, 0

    def has_room(self) -> bool:
        """Count a line. Returns whether it may be written."""
        self._num += 1
        self._num_left_out += self._num > MAX_LINES
        return self._num <= MAX_LINES

    def end(self, log: logging.Logger) -> None:
        """The interval is over."""
        if self._num_left_out:
            log.log(self._level, self._rest, extra={"fields": {"num": self._num_left_out}})
        self._num, self._num_left_out = 0, 0


class RefusalLog:
    """Logs refused requests, and those that failed because of a fault of this program: at most MAX_LINES of each in
    INTERVAL_S."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._end_s = 0.0
        self._refused = _Lines("rejected more requests", logging.INFO)
        self._failed = _Lines("more requests failed", logging.ERROR)

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
        self.flush()
        return self._failed.has_room()

    def flush(self) -> None:
        """Log the numbers of requests without a line, if their interval is over. Call it once per heartbeat."""
        if (now_s := self._clock()) < self._end_s:
            return
        self._refused.end(self._log)
        self._failed.end(self._log)
        self._end_s = now_s + INTERVAL_S

    def _add(self, request: web.BaseRequest, response: web.StreamResponse, error: ApiError) -> None:
        self.flush()
        if not self._refused.has_room():
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
        self._log.info("rejected", extra={"fields": fields})


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
