"""Where HTTP messages end: what every listener of ours adds to the heads of its responses."""

from aiohttp import HttpVersion11, hdrs, web


def close(response: web.StreamResponse) -> None:
    """Let the connection end with a response that is being prepared."""
    response.force_close()
    response.headers[hdrs.CONNECTION] = "close"


async def close_if_unclear(http_request: web.Request, response: web.StreamResponse) -> None:
    """End the connection, and say so, where one of the two sides can't tell where the other's message ends: behind
    CONNECT, behind an upgrade to another protocol (aiohttp drops what came with it), behind a compressed body that no
    route has read, and behind a stream to an HTTP/1.0 client, which knows no chunks. For `on_response_prepare`."""
    headers = http_request.headers
    is_unread = hdrs.CONTENT_ENCODING in headers and not http_request.content.is_eof()
    is_endless = http_request.version < HttpVersion11 and hdrs.CONTENT_LENGTH not in response.headers
    if http_request.method == hdrs.METH_CONNECT or hdrs.UPGRADE in headers or is_unread or is_endless:
        close(response)
