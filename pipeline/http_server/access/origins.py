"""Protects a listener without API keys against web pages of other sites.

A page can make the browser send requests to any address that it reaches, including a server on loopback. Two headers,
which a page can't forge, are checked:

- `Host`. By DNS rebinding a site resolves its own name to 127.0.0.1; the browser then takes the server for that site
  and lets the page read the replies. So the host must be an IP address, localhost or a configured name.
- `Origin`. Browsers send the page's origin with every POST, and with every cross-origin request whose reply the page
  can read. So the origin must be the server's own or a configured one. Other programs send none.

Every server also refuses a body whose declared type is not JSON: HTML forms, and scripts without CORS permission, can
only send other types. The exception is `curl -d` without a type, on routes whose documentation has such examples.
"""

import functools
import re
from http import HTTPStatus

from aiohttp import HttpVersion11, web

from pipeline.config.settings import GatewaySettings as GatewaySettings
from pipeline.config.values.browsers import (
    ANY,
    Authority,
    Origin,
    is_listed,
    normalized_host,
    parse_authority,
    parse_origin,
)
from pipeline.http_server.apis.table import family_of
from pipeline.http_server.errors import ApiError, shown

_ABSOLUTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://([^/?#]*)")
_JSON = re.compile(r"application/(?:json|[!#$&^_.+a-z0-9-]+\+json)", re.ASCII)
_OTHER_SITES = ("cross-site", "same-site")
"""Values of `Sec-Fetch-Site` for a page of another origin."""
_READING = ("GET", "HEAD")
_CURL_DEFAULT = "application/x-www-form-urlencoded"
"""The type that `curl -d` declares unless its user sets another."""
NUM_KEPT_HOSTS = 64
"""Host headers whose check is remembered: parsing an address takes as long as parsing a small body."""
_BROWSER_HEADERS = ("Origin", "Sec-Fetch-Site")
"""Browsers send `Origin` with every POST, and a page can remove neither header."""


class OriginPolicy:
    """Which hosts and origins are allowed."""

    def __init__(self, settings: GatewaySettings, scheme: str = "http", *, is_admin: bool = False) -> None:
        """`scheme` is that of the listener's own origin. `is_admin` is for the words of errors."""
        self._who = "the admin listener, which needs no API key" if is_admin else "this server, which has no API keys"
        self._other_way = "" if is_admin else ", or give the server API keys"
        self._scheme, self._default_port = scheme, {"http": 80, "https": 443}[scheme]
        own = [found.host for name in (settings.host, settings.admin_host) if (found := parse_authority(name))]
        listed = [host for entry in settings.allowed_hosts if (host := normalized_host(entry)) is not None]
        self._hosts = frozenset((*own, *listed))
        origins = map(parse_origin, settings.allowed_origins)
        self._origins = frozenset(origin for origin in origins if origin is not None)
        self._allows_any_origin = ANY in settings.allowed_origins
        self._checked_host = functools.lru_cache(NUM_KEPT_HOSTS)(self._check_host)
        """Keeps those that are allowed."""

    def check(self, request: web.BaseRequest) -> None:
        """Raises ApiError, 403."""
        self._check_origin(request, self._checked_hosts(request))

    def _checked_hosts(self, request: web.BaseRequest) -> list[Authority]:
        """The hosts that the request names: in its Host header and, if its target is absolute, there."""
        names = request.headers.getall("Host", [])
        if not names and request.version < HttpVersion11:
            return []  # browsers always send it
        if len(names) != 1:
            raise _forbidden("host_not_allowed", f"a request must have one Host header, not {len(names)}")
        if match := _ABSOLUTE.match(request.raw_path):
            names.append(match[1])
        return [self._checked_host(name) for name in names]

    def _check_host(self, name: str) -> Authority:
        authority = parse_authority(name)
        if authority is None:
            raise _forbidden("host_not_allowed", f"the Host '{shown(name)}' is not HOST or HOST:PORT")
        host = authority.host
        is_local = host == "localhost" or host.endswith(".localhost")
        if not (authority.is_ip or is_local or is_listed(host, self._hosts)):
            message = (
                f"the Host '{shown(host)}' is not an allowed name of {self._who}: add it to the server's "
                f"gateway.allowed_hosts, as by --set gateway.allowed_hosts={shown(host)}, or use the server's IP "
                f"address{self._other_way}"
            )
            raise _forbidden("host_not_allowed", message)
        return authority

    def _check_origin(self, request: web.BaseRequest, hosts: list[Authority]) -> None:
        if self._allows_any_origin:
            return
        origins = request.headers.getall("Origin", [])
        if not origins and request.method not in _READING:
            if request.headers.get("Sec-Fetch-Site", "").lower() in _OTHER_SITES:
                raise _forbidden("origin_not_allowed", f"a page of another site sent this request: {self._hint(None)}")
            return
        own = {Origin(self._scheme, host.host, host.port or self._default_port) for host in hosts}
        for text in origins:
            origin = parse_origin(text)
            if origin is None or not (origin in self._origins or own == {origin}):
                hint = self._hint(text if origin else None)
                message = f"the Origin '{shown(text)}' is not an allowed origin of {self._who}: {hint}"
                raise _forbidden("origin_not_allowed", message)

    def _hint(self, origin: str | None) -> str:
        """How to allow an origin; by an example if none is known."""
        named = "https://chat.example.com" if origin is None else shown(origin)
        example = f"--set gateway.allowed_origins={named}"
        return f"add it to the server's gateway.allowed_origins, as by {example}{self._other_way}"


def check_content_type(request: web.BaseRequest) -> None:
    """Raises ApiError, 415, for a POST whose declared body type is not JSON. A request without a type is accepted:
    simple clients leave it out, and requests of browsers are checked by their Origin. On some routes, curl's default
    type is accepted too, unless a browser sent the request."""
    types = request.headers.getall("Content-Type", []) if request.method == "POST" else []
    for given in types:
        kind = given.partition(";")[0].strip().lower()
        if not (_JSON.fullmatch(kind) or (kind == _CURL_DEFAULT and _is_curl_example(request))):
            message = (
                f"Unsupported Media Type: a body must be 'application/json', not '{shown(kind)}'; "
                "with curl: -H 'Content-Type: application/json'"
            )
            raise ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message, code="unsupported_media_type")


def _is_curl_example(request: web.BaseRequest) -> bool:
    """Whether the request is for a route whose documentation has it like this, and no browser sent it."""
    family = family_of(request.rel_url.raw_path)
    return family.accepts_curl_default and not any(name in request.headers for name in _BROWSER_HEADERS)


def _forbidden(code: str, message: str) -> ApiError:
    return ApiError(HTTPStatus.FORBIDDEN, message, code=code)
