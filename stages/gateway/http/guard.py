"""Who is let in over HTTP.

It stands before the routes, so that it holds for whatever is asked, paths that lead nowhere and methods that nobody
knows among them; and before the body, of which no byte is read or asked for until the request is known to be allowed.
A server with API keys asks for one of them. A server without keys refuses what a web page of another site may have
sent (see origins.py). Both refuse a body that is declared as something other than JSON.
"""

from collections.abc import Awaitable, Callable, Collection
from contextvars import ContextVar
from http import HTTPStatus

from aiohttp import web

from pipeline.runtime.api_keys import NO_SCOPE, Keys, bearer
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.http import request_ids
from pipeline.stages.gateway.http.origins import OriginPolicy, check_content_type

Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

OPEN_PATHS = ("/health", "/metrics")
"""Where there is no admin listener. Written so and not otherwise: what a router would take for the same is not
meant."""
OPEN_METHODS = ("GET", "HEAD")
_scope: ContextVar[str] = ContextVar("scope", default=NO_SCOPE)
"""Of the request that the current task handles; aiohttp has a task for each connection."""


def guarded(handle: Handle, keys: Keys, open_paths: Collection[str]) -> Handle:
    """`handle`, for those who show one of the keys; whoever asks for one of `open_paths` needs none."""

    async def guard(request: web.BaseRequest) -> web.StreamResponse:
        headers = request.headers.getall("Authorization", [])
        is_open = request.method in OPEN_METHODS and request.rel_url.raw_path in open_paths
        scope = keys.scope_of(bearer(headers))
        if scope is None and not is_open:
            return _refusal(request, unauthorized(bool(headers)), {"WWW-Authenticate": "Bearer"})
        _scope.set(scope or NO_SCOPE)
        try:
            check_content_type(request)
        except ApiError as error:
            return _refusal(request, error)
        return await handle(request)

    return guard


def guarded_by_origin(handle: Handle, policy: OriginPolicy) -> Handle:
    """`handle`, without keys: for requests that no web page of another site can have sent."""

    async def guard(request: web.BaseRequest) -> web.StreamResponse:
        try:
            policy.check(request)
            check_content_type(request)
        except ApiError as error:
            return _refusal(request, error)
        return await handle(request)

    return guard


def current_scope() -> str:
    """The scope of the API key that the current request has shown; see `Keys.scope_of`."""
    return _scope.get()


def unauthorized(has_shown: bool) -> ApiError:
    """401. It does not repeat what was shown."""
    message = (
        "this is no API key of this server"
        if has_shown
        else "an API key is needed: over HTTP as 'Authorization: Bearer KEY', over ZeroMQ as api_key of hello"
    )
    return ApiError(HTTPStatus.UNAUTHORIZED, message, code="invalid_api_key")


def _refusal(request: web.BaseRequest, error: ApiError, headers: dict[str, str] | None = None) -> web.Response:
    response = web.Response(
        status=error.status,
        body=error.json(),
        content_type="application/json",
        headers=headers,
    )
    if (name := request_ids.to_repeat(request.headers)) is not None:
        response.headers[request_ids.HEADER] = name
    response.force_close()  # what it may send still is not a request's
    return response
