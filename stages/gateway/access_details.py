"""What the access log says of an opened request."""

import time
from functools import partial
from http import HTTPStatus
from typing import Any

from aiohttp import web

from pipeline.http_server.access_log import CLIENT_LEFT, DETAILS, AccessLog, Details
from pipeline.http_server.error_responses import REQUEST_ID
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.open_requests.request import Request


def set_opened(http_request: web.Request, request: Request, *, in_background: bool = False) -> None:
    """An HTTP request has opened this one in the table. One in the background has a line of its own."""
    http_request[REQUEST_ID] = request.id
    if not in_background:
        http_request[DETAILS] = Details(partial(details_of, request))


def log_background(log: AccessLog, request: Request, path: str, client: str) -> None:
    """A request in the background is over, which a client at this address has started at `path`."""
    log.add(
        request.parsed.scope,
        client=client,
        method="BACKGROUND",
        path=path,
        status=HTTPStatus.OK if request.failure is None else request.failure.status,
        request_id=request.id,
        total_s=time.monotonic() - request.received_s,
        **details_of(request),
    )


def log_zmq(
    log: AccessLog,
    request: Request | None,
    request_id: str,
    error: ApiError | None,
    scope: str,
    client: str,
    total_s: float,
    *,
    has_left: bool,
) -> None:
    """A request over ZeroMQ is over, or was refused before it was opened. `has_left`: its client did not stay."""
    fields = {} if request is None else details_of(request)
    status = int(CLIENT_LEFT if has_left else HTTPStatus.OK)
    if error is not None:
        status, fields["error"] = error.status, error.code or error.message
    log.add(
        scope,
        client=client,
        method="ZMQ",
        path="generate",
        status=status,
        request_id=request_id,
        total_s=total_s,
        **fields,
    )


def details_of(request: Request) -> dict[str, Any]:
    """Fields of `Entry`, when the response is over."""
    found: dict[str, Any] = {"model": request.parsed.model, "prompt_tokens": request.num_prompt_tokens}
    if not request.parsed.is_prompt_only:
        found["cached_tokens"] = request.num_cached_tokens
        found["output_tokens"] = request.num_generated
        if firsts := [one.first_s for one in request.sequences if one.first_s]:
            found["ttft_s"] = max(0.0, min(firsts) - request.received_s)
    if request.failure is not None:
        found["error"] = request.failure.code or request.failure.message
    return found
