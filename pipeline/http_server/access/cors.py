"""Cross-origin resource sharing (https://fetch.spec.whatwg.org/#http-cors-protocol): lets web pages of
gateway.allowed_origins send requests and read the responses.

    browser ──OPTIONS, Access-Control-Request-Method──► preflight: answered here, without an API key
    browser ──POST, Origin──► the route; its response gets the headers that let the page read it

Without allowed origins nothing changes: no header is sent, and OPTIONS is a method like any other.
"""

import re
from collections.abc import Callable
from http import HTTPStatus

from aiohttp import web

from pipeline.config.settings import GatewaySettings as GatewaySettings
from pipeline.config.values.browsers import ANY, is_token, parse_origin
from pipeline.http_server.access.guard import Handle
from pipeline.http_server.apis.table import FAMILIES
from pipeline.http_server.error_responses import error_response
from pipeline.http_server.errors import ApiError, shown
from pipeline.http_server.server_header import set_server

MAX_AGE_S = 600
"""How long a browser may use the answer to a preflight."""
METHODS = ("GET", "HEAD", "POST", "DELETE", "OPTIONS")
"""What `*` in gateway.allowed_methods stands for."""
EXPOSED = ", ".join(
    dict.fromkeys(
        ("X-Request-Id", "Retry-After", "Warning", *(name for family in FAMILIES for name in family.own_headers))
    )
)
"""Headers of responses that a page may read, besides those that every page may."""


class Cors:
    """The CORS headers of one gateway's responses."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.is_on = bool(settings.allowed_origins)
        self._any_origin = ANY in settings.allowed_origins
        self._origins = {parse_origin(entry) for entry in settings.allowed_origins if entry != ANY}
        self._any_method = ANY in settings.allowed_methods
        self._methods = METHODS if self._any_method else tuple(name.upper() for name in settings.allowed_methods)
        self._any_header = ANY in settings.allowed_headers
        self._headers = tuple(name.lower() for name in settings.allowed_headers if name != ANY)
        self._credentials = settings.allow_credentials

    def wrap(self, handle: Handle, check: Callable[[web.BaseRequest], None] | None = None) -> Handle:
        """Wrap `handle`, which is outside of all routes: answer preflights, and add the headers to responses that were
        not sent yet. `check` raises ApiError for a preflight of a host that is not allowed."""

        async def with_cors(request: web.BaseRequest) -> web.StreamResponse:
            if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
                response: web.StreamResponse
                try:
                    if check is not None:
                        check(request)
                    response = self._preflight(request)
                except ApiError as error:
                    response = error_response(request, error)
                    response.force_close()
            else:
                response = await handle(request)
            if not response.prepared:
                set_server(response)
                self.add_headers(request, response)
            return response

        return with_cors if self.is_on else handle

    def add_headers(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Add what lets the page that sent the request read the response."""
        if not self.is_on:
            return
        if not (self._any_origin and not self._credentials):
            _add_vary(response)  # a shared cache must not give one origin's response to another
        origin = self._allowed_origin(request)
        if origin is None:
            return
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Expose-Headers"] = EXPOSED
        if self._credentials:
            response.headers["Access-Control-Allow-Credentials"] = "true"

    def _allowed_origin(self, request: web.BaseRequest) -> str | None:
        """The value of Access-Control-Allow-Origin; None for a request without an origin, or of another one."""
        origins = request.headers.getall("Origin", [])
        if len(origins) != 1:
            return None
        if self._any_origin:
            # With credentials, browsers do not accept "*".
            return ANY if not self._credentials else origins[0] if _VISIBLE.fullmatch(origins[0]) else None
        parsed = parse_origin(origins[0])
        return origins[0] if parsed is not None and parsed in self._origins else None

    def _preflight(self, request: web.BaseRequest) -> web.Response:
        """The answer to a preflight. Raises ApiError, 403, with the setting to change."""
        if self._allowed_origin(request) is None:
            origin = request.headers.get("Origin", "")
            raise _refused("allowed_origins", "origin_not_allowed", f"the Origin '{shown(origin)}'")
        method = request.headers["Access-Control-Request-Method"].upper()
        if method not in self._methods:
            raise _refused("allowed_methods", "method_not_allowed", f"the method '{shown(method)}'")
        entries = map(str.strip, request.headers.get("Access-Control-Request-Headers", "").split(","))
        asked = [entry for entry in entries if entry]
        for name in map(str.lower, asked):
            if not (is_token(name) if self._any_header else name in (*_ALWAYS_ALLOWED, *self._headers)):
                raise _refused("allowed_headers", "header_not_allowed", f"the header '{shown(name)}'")
        headers = {"Access-Control-Allow-Methods": ", ".join(self._methods), "Access-Control-Max-Age": str(MAX_AGE_S)}
        if asked:
            headers["Access-Control-Allow-Headers"] = ", ".join(asked)
        return web.Response(status=HTTPStatus.NO_CONTENT, headers=headers)


_VISIBLE = re.compile(r"[!-~]+")
"""What a response may repeat of an Origin."""
_ALWAYS_ALLOWED = ("accept", "accept-language", "content-language", "content-type")
"""Headers that need no listing, as in Starlette."""


def _add_vary(response: web.StreamResponse) -> None:
    names = [name.strip() for name in response.headers.get("Vary", "").split(",") if name.strip()]
    if "Origin" not in names:
        response.headers["Vary"] = ", ".join([*names, "Origin"])


def _refused(key: str, code: str, what: str) -> ApiError:
    return ApiError(HTTPStatus.FORBIDDEN, f"{what} is not allowed for pages of other sites (gateway.{key})", code=code)
