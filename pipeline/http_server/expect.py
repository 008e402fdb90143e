"""The answer to `Expect: 100-continue`, with which a client asks before it sends its body."""

from http import HTTPStatus

from aiohttp import HttpVersion11, web

from pipeline.http_server.error_responses import error_response
from pipeline.http_server.errors import ApiError, shown


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
