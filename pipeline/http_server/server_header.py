"""Headers of every response: the server's name, and the client's request id.

aiohttp's own `Server` header lists the versions of Python and aiohttp, which only help attackers.
"""

from aiohttp import hdrs, web

from pipeline.http_server import request_ids

NAME = "pipeline"


def set_server(response: web.StreamResponse) -> None:
    response.headers[hdrs.SERVER] = NAME


async def add_headers(http_request: web.Request, response: web.StreamResponse) -> None:
    """Repeat the client's request id in every response, and name the server."""
    set_server(response)
    if (name := request_ids.to_repeat(http_request.headers)) is not None:
        response.headers[request_ids.HEADER] = name
