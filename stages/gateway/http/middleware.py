"""What every response has in common: the form of errors, two headers, and the answer to Expect."""

from http import HTTPStatus

from aiohttp import HttpVersion11, web
from aiohttp.typedefs import Handler

from pipeline.stages.gateway.errors import ApiError, shown
from pipeline.stages.gateway.http.error_responses import error_response
from pipeline.stages.gateway.http.routes import meant_route
from pipeline.stages.gateway.http.server_header import set_server
from pipeline.stages.gateway.ollama.errors import not_found_advice
from pipeline.stages.gateway.parsing import request_ids


async def add_headers(http_request: web.Request, response: web.StreamResponse) -> None:
    """Repeat the client's request id in every response, and name the server."""
    set_server(response)
    if (name := request_ids.to_repeat(http_request.headers)) is not None:
        response.headers[request_ids.HEADER] = name


@web.middleware
async def format_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Return all errors in the shape of their path, including those of aiohttp's router."""
    try:
        return await handler(request)
    except ApiError as error:
        return error_response(request, error)
    except web.HTTPMethodNotAllowed as refusal:
        message = f"{request.method} is not allowed for {shown(request.path)}"
        return error_response(request, ApiError(refusal.status, message), {"Allow": refusal.headers["Allow"]})
    except web.HTTPNotFound as refusal:
        advice = not_found_advice(request.path) or meant_route(request.method, request.path)
        message = f"Not found: {request.method} {shown(request.path)}{advice}"
        return error_response(request, ApiError(refusal.status, message))
    except web.HTTPException as refusal:
        return error_response(request, ApiError(refusal.status, refusal.text or refusal.reason))


async def answer_expect(http_request: web.Request) -> web.StreamResponse | None:
    """Answer an Expect header. aiohttp calls this before any middleware, so errors are returned, not raised."""
    expectation = http_request.headers["Expect"]
    if http_request.version < HttpVersion11:
        return None  # RFC 9110, 10.1.1: ignore it
    if expectation.lower() != "100-continue":
        message = f"unsupported expectation '{shown(expectation)}': only 100-continue is supported"
        return error_response(http_request, ApiError(HTTPStatus.EXPECTATION_FAILED, message))
    await http_request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    http_request.writer.output_size = 0  # the response itself has not started
    return None
