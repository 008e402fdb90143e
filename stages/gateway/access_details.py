"""What the access log says of an opened request."""

from functools import partial
from typing import Any

from aiohttp import web

from pipeline.http_server.access_log import DETAILS, Details
from pipeline.http_server.error_responses import REQUEST_ID
from pipeline.stages.gateway.request import Request


def set_opened(http_request: web.Request, request: Request) -> None:
    """An HTTP request has opened this one in the table."""
    http_request[REQUEST_ID] = request.id
    http_request[DETAILS] = Details(partial(details_of, request))


def details_of(request: Request) -> dict[str, Any]:
    """Fields of `Entry`, when the response is over."""
    found: dict[str, Any] = {"model": request.parsed.model, "prompt_tokens": request.num_prompt_tokens}
    if not request.parsed.is_lookup:
        found["cached_tokens"] = request.num_cached_tokens
        found["output_tokens"] = sum(one.num_generated for one in request.sequences)
        if firsts := [one.first_s for one in request.sequences if one.first_s]:
            found["ttft_s"] = max(0.0, min(firsts) - request.received_s)
    if request.failure is not None:
        found["error"] = request.failure.code or request.failure.message
    return found
