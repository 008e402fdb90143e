"""The answer to `Expect: 100-continue`, with which a client asks before it sends its body."""

from http import HTTPStatus

from aiohttp import HttpVersion11, web

from pipeline.http_server.error_responses import error_response
from pipeline.http_server.errors import ApiError, shown
from pipeline.http_server.guard import Handle


async def answer_expect(http_request: web.Request) -> web.StreamResponse | None:
    """Answer an Expect header. aiohttp calls this before any middleware, so errors are returned, not raised."""
    expectation = http_request.headers["Expect"]
    if http_request.version < HttpVersion11:
        return None  # RFC 9110, 10.1.1: ignore it
    if expectation.lower() != "100-continue":
        return _unknown_expectation(http_request)
    await http_request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    http_request.writer.output_size = 0  # the response itself has not started
    return None


def format_early_errors(handle: Handle) -> Handle:
    """Wrap `handle`, which is outside of all routes: give errors that aiohttp raises before any middleware runs, of an
    Expect header for a path without a route, the shape of their path."""

    async def formatted(request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await handle(request)
        except web.HTTPExpectationFailed:
            return _unknown_expectation(request)

    return formatted


def refuse(http_request: web.BaseRequest, error: ApiError) -> web.Response:
    """An error before the body is sent. It ends the connection: the client may send the body before it reads this, or
    not at all, and then its next request would be read as the body."""
    refusal = error_response(http_request, error)
    refusal.force_close()
    return refusal


def _unknown_expectation(http_request: web.BaseRequest) -> web.Response:
    expectation = shown(http_request.headers["Expect"])
    message = f"unsupported expectation '{expectation}': only 100-continue is supported"
    return refuse(http_request, ApiError(HTTPStatus.EXPECTATION_FAILED, message))
