"""Who is let in over HTTP.

It stands before the routes, so that it holds for whatever is asked, paths that lead nowhere and methods that nobody
knows among them; and before the body, of which no byte is read or asked for until the key is known to be right.
"""

from collections.abc import Awaitable, Callable, Collection
from http import HTTPStatus

from aiohttp import web

from pipeline.api_keys import Keys, bearer
from pipeline.stages.gateway import names
from pipeline.stages.gateway.errors import ApiError

Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

OPEN_PATHS = ("/health", "/metrics")
"""Where there is no admin listener. Written so and not otherwise: what a router would take for the same is not
meant."""
OPEN_METHODS = ("GET", "HEAD")


def guarded(handle: Handle, keys: Keys, open_paths: Collection[str]) -> Handle:
    """`handle`, for those who show one of the keys; whoever asks for one of `open_paths` needs none."""

    async def guard(request: web.BaseRequest) -> web.StreamResponse:
        headers = request.headers.getall("Authorization", [])
        is_open = request.method in OPEN_METHODS and request.rel_url.raw_path in open_paths
        if keys.admits(bearer(headers)) or is_open:
            return await handle(request)
        return _refusal(request, bool(headers))

    return guard


def unauthorized(has_shown: bool) -> ApiError:
    """401. It does not repeat what was shown."""
    message = (
        "this is no API key of this server"
        if has_shown
        else "an API key is needed: over HTTP as 'Authorization: Bearer KEY', over ZeroMQ as api_key of hello"
    )
    return ApiError(HTTPStatus.UNAUTHORIZED, message, code="invalid_api_key")


def _refusal(request: web.BaseRequest, has_shown: bool) -> web.Response:
    error = unauthorized(has_shown)
    response = web.Response(
        status=error.status,
        body=error.json(),
        content_type="application/json",
        headers={"WWW-Authenticate": "Bearer"},
    )
    if (name := names.to_repeat(request.headers)) is not None:
        response.headers[names.HEADER] = name
    response.force_close()  # what it may send still is not a request's
    return response
