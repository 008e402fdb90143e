"""Authentication of HTTP requests.

It runs before routing, so it also covers unknown paths and methods, and before any byte of the body is read or
requested. A server with API keys requires one of them. A server without keys refuses requests that a web page of
another site may have sent (origins.py). Both refuse a body whose declared type is not JSON.
"""

import re
from collections.abc import Awaitable, Callable, Container
from contextvars import ContextVar
from http import HTTPStatus

from aiohttp import web

from pipeline.http_server import request_ids
from pipeline.http_server.access.origins import OriginPolicy, check_content_type
from pipeline.http_server.error_responses import error_response
from pipeline.http_server.errors import ApiError
from pipeline.http_server.server_header import set_server
from pipeline.runtime.security.api_keys import NO_SCOPE, Keys, bearer

Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

OPEN_PATHS = ("/health", "/live", "/metrics", "/ping")
"""Paths without a key, if there is no admin listener, besides those of the web page. They are compared exactly, not as
a router would."""
OPEN_METHODS = ("GET", "HEAD")
PAGE, PAGE_PREFIX = "/", "/page/"
"""Paths of the web page: its index, and where its other files are."""
_PAGE_FILE = re.compile(rf"{PAGE_PREFIX}[A-Za-z0-9_-]+(?:[./][A-Za-z0-9_-]+)*", re.ASCII)
"""Without `..`, escapes and double slashes, in which a server or a proxy behind the ingress might read another path."""
KEY_HEADER = "x-api-key"
"""Clients of Anthropic's API send their key in it. `Authorization` takes precedence."""
_scope: ContextVar[str] = ContextVar("scope", default=NO_SCOPE)
"""Scope of the request in the current task. aiohttp has a task for each request, whose context begins without one."""


class OpenPaths:
    """OPEN_PATHS and those of the web page, for a server that does not know which files the page has."""

    def __contains__(self, path: object) -> bool:
        return path in OPEN_PATHS or path == PAGE or (isinstance(path, str) and _PAGE_FILE.fullmatch(path) is not None)


def require_key(handle: Handle, keys: Keys, open_paths: Container[str]) -> Handle:
    """Wrap `handle`: require one of the keys, except for GET and HEAD of `open_paths`."""

    async def guard(request: web.BaseRequest) -> web.StreamResponse:
        headers = request.headers.getall("Authorization", [])
        key = bearer(headers)
        if not headers:
            headers = request.headers.getall(KEY_HEADER, [])
            key = headers[0].strip() if len(headers) == 1 else None
        is_open = request.method in OPEN_METHODS and request.rel_url.raw_path in open_paths
        scope = keys.scope_of(key)
        _scope.set(scope or NO_SCOPE)
        if scope is None and not is_open:
            return _refusal(
                request,
                unauthorized(bool(headers), "'Authorization: Bearer KEY' or 'x-api-key: KEY'", is_key=key is not None),
                {"WWW-Authenticate": "Bearer"},
            )
        try:
            check_content_type(request)
        except ApiError as error:
            return _refusal(request, error)
        return await handle(request)

    return guard


def require_allowed_origin(handle: Handle, policy: OriginPolicy) -> Handle:
    """Wrap `handle` for a server without keys: refuse requests that a web page of another site may have sent."""

    async def guard(request: web.BaseRequest) -> web.StreamResponse:
        try:
            policy.check(request)
            check_content_type(request)
        except ApiError as error:
            return _refusal(request, error)
        return await handle(request)

    return guard


def current_scope() -> str:
    """The scope of the current request's API key; see `Keys.scope_of`."""
    return _scope.get()


def unauthorized(has_key: bool, how: str, *, is_key: bool = True) -> ApiError:
    """401. The message does not repeat the key; `how` says how to send one. `is_key`: what was sent has that form."""
    message = "Invalid API key" if has_key else f"API key required: send {how}"
    if has_key and not is_key:
        message += f": the header has another form; send {how}"
    return ApiError(HTTPStatus.UNAUTHORIZED, message, code="invalid_api_key")


def _refusal(request: web.BaseRequest, error: ApiError, headers: dict[str, str] | None = None) -> web.Response:
    response = error_response(request, error, headers)
    if (name := request_ids.to_repeat(request.headers)) is not None:
        response.headers[request_ids.HEADER] = name
    set_server(response)
    response.force_close()  # whatever the client sends next is not read as a request
    return response
