"""Which headers pass from one connection to the other, and the head of the request for a replica. Pure.

Names of headers are compared without their case (RFC 9110, 5.1).
"""

import re
from collections.abc import Iterable, Mapping

from aiohttp import web

from pipeline.http_server import time_left
from pipeline.runtime.resume_points import RESUMABLE, RESUME

BODILESS = ("GET", "HEAD")
"""A body of such a request has no meaning (RFC 9110, 9.3.1): it is not read, and not passed on."""
HOP_HEADERS = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
        "transfer-encoding", "upgrade", "content-length",
    }
)  # fmt: skip
"""Belong to one connection, or are made anew. So do those that `Connection` names (RFC 9110, 7.6.1)."""
OF_REQUEST = frozenset(
    {"expect", "content-encoding", "accept-encoding", RESUMABLE.lower(), RESUME.lower(), time_left.HEADER.lower()}
)
"""Also not passed on to a replica: bodies are decompressed here, points are read in plain responses only, and each
attempt has less time."""
_AUTHORITY = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?#]*")


def uses_resume_points(headers: Mapping[str, str]) -> bool:
    """Whether a client asks for resume points, or sends some: it gets them unchanged. The names in `headers` must not
    depend on case, as in aiohttp's."""
    return RESUMABLE in headers or RESUME in headers


def end_to_end(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The headers that don't belong to the connection."""
    pairs = list(headers)
    named = {
        token.strip().lower() for name, value in pairs if name.lower() == "connection" for token in value.split(",")
    }
    return [(name, value) for name, value in pairs if name.lower() not in HOP_HEADERS and name.lower() not in named]


def head_bytes(request: web.Request, num_body_bytes: int, extra: Mapping[str, str]) -> bytes:
    """The head of a request for a replica, as the client's, with another length and with `extra` headers. Headers by
    which the client asks for resume points pass if `extra` has none."""
    pairs = [(name, value) for name, value in end_to_end(request.headers.items()) if name.lower() not in OF_REQUEST]
    if RESUMABLE not in extra:
        pairs += [(name, request.headers[name]) for name in (RESUMABLE, RESUME) if name in request.headers]
    pairs += extra.items()
    if num_body_bytes or request.method not in BODILESS:
        pairs.append(("Content-Length", str(num_body_bytes)))
    absolute = _AUTHORITY.match(request.raw_path)
    target = request.raw_path if absolute is None else request.raw_path[absolute.end() :]
    if not target.startswith(("/", "*")):
        target = f"/{target}"
    lines = [f"{request.method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in pairs)]
    return "\r\n".join([*lines, "\r\n"]).encode("utf-8", "surrogateescape")
