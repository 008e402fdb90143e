"""The files of the web page, as HTTP responses.

They contain nothing of the server, the model or a client, so a server with API keys serves them without one: the page
asks its reader for a key and sends it with each request.
"""

import base64
import functools
import hashlib
from http import HTTPStatus
from pathlib import Path

import msgspec
from aiohttp import web

from pipeline.http_server.access.guard import PAGE, PAGE_PREFIX

FOLDER = Path(__file__).parent / "static"
INDEX = "index.html"

MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

POLICY = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self' blob:",  # blob: is an image or audio file that the reader has attached
    "media-src blob:",
    "connect-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    "require-trusted-types-for 'script'",  # innerHTML and its like throw
    "trusted-types 'none'",
)
HEADERS = {
    "Content-Security-Policy": "; ".join(POLICY),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-cache",  # browsers keep the files, and ask whether they have changed
}


class PageFile(msgspec.Struct, frozen=True):
    media_type: str
    body: bytes
    etag: str


@functools.cache
def paths() -> dict[str, Path]:
    """The files by their paths on the server."""
    found = {PAGE_PREFIX + path.relative_to(FOLDER).as_posix(): path for path in FOLDER.rglob("*") if path.is_file()}
    found[PAGE] = Path(found.pop(PAGE_PREFIX + INDEX))
    return found


@functools.cache
def load(path: str) -> PageFile:
    """A file of `paths`, read at its first use."""
    file = paths()[path]
    body = file.read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(body).digest()[:12]).decode()
    return PageFile(MEDIA_TYPES[file.suffix], body, digest)


async def serve(request: web.Request) -> web.StreamResponse:
    """GET of a path of `paths`."""
    file = load(request.path)
    known = request.if_none_match or ()
    if any(etag.value in (file.etag, "*") for etag in known):
        response = web.Response(status=HTTPStatus.NOT_MODIFIED, headers=HEADERS)
    else:
        response = web.Response(body=file.body, content_type=file.media_type, charset="utf-8", headers=HEADERS)
    response.etag = file.etag
    return response


def routes() -> list[web.RouteDef]:
    """A route for each file."""
    return [web.get(path, serve, allow_head=True) for path in paths()]
