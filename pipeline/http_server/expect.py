"""The answer to `Expect: 100-continue`, with which a client asks before it sends its body."""

from http import HTTPStatus

from aiohttp import HttpVersion11, web

from pipeline.http_server.access.guard import Handle
from pipeline.http_server.error_responses import error_response
from pipeline.http_server.errors import ApiError, shown
from pipeline.http_server.server_header import set_server


async def answer_expect(http_request: web.Request) -> web.StreamResponse | None:
    """Answer an Expect header that is known. aiohttp calls this before any middleware, so errors are returned, not
    raised."""
    if http_request.version < HttpVersion11:
        return None  # RFC 9110, 10.1.1: ignore it
    await http_request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    http_request.writer.output_size = 0  # the response itself has not started
    return None


def refuse_unknown(handle: Handle) -> Handle:
    """Wrap `handle`, which is outside of all routes: refuse an Expect header that means something else, with 417. For a
    path without a route, aiohttp would do so in its own way, and fail if the header is not UTF-8."""

    async def known(request: web.BaseRequest) -> web.StreamResponse:
        expectation = request.headers.get("Expect", "100-continue")
        if request.version < HttpVersion11 or expectation.lower() == "100-continue":
            return await handle(request)
        message = f"unsupported expectation '{shown(expectation)}': only 100-continue is supported"
        refusal = refuse(request, ApiError(HTTPStatus.EXPECTATION_FAILED, message))
        set_server(refusal)
        return refusal

    return known


def refuse(http_request: web.BaseRequest, error: ApiError) -> web.Response:
    """An error before the body is sent. It ends the connection: the client may send the body before it reads this, or
    not at all, and then its next request would be read as the body."""
    refusal = error_response(http_request, error)
    refusal.force_close()
    return refusal
