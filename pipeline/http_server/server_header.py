"""The `Server` header. aiohttp's own lists the versions of Python and aiohttp, which only help attackers."""

from aiohttp import hdrs, web

NAME = "pipeline"


def set_server(response: web.StreamResponse) -> None:
    response.headers[hdrs.SERVER] = NAME
