"""Where HTTP messages end: what every listener of ours adds to the heads of its responses, and how a connection ends
behind one."""

import asyncio

from aiohttp import HttpVersion11, hdrs, web

QUIET_S = 0.5
"""Behind a response, a connection on which nothing has come for so long can end."""
DROP_S = 10.0
"""It ends then in any case: as long as aiohttp reads the rest of other bodies."""


class DroppedRest:
    """The rest of a compressed body that no route has read. It is dropped as it arrives, and not decompressed. If the
    connection ended before, the kernel would reset it, and with it what the client has not read of the response."""

    def __init__(self) -> None:
        self.is_on = False
        self._num_bytes = 0

    def drop(self, data: bytes) -> None:
        self._num_bytes += len(data)

    async def wait(self) -> None:
        """Until no more comes."""
        loop, before = asyncio.get_running_loop(), -1
        end_s = loop.time() + DROP_S
        while self._num_bytes > before and loop.time() < end_s:
            before = self._num_bytes
            await asyncio.sleep(QUIET_S)


def is_compressed(http_request: web.BaseRequest) -> bool:
    return hdrs.CONTENT_ENCODING in http_request.headers


def close(response: web.StreamResponse) -> None:
    """Let the connection end with a response that is being prepared."""
    response.force_close()
    response.headers[hdrs.CONNECTION] = "close"


async def close_if_unclear(http_request: web.Request, response: web.StreamResponse) -> None:
    """End the connection, and say so, where one of the two sides can't tell where the other's message ends: behind
    CONNECT, behind an upgrade to another protocol (aiohttp drops what came with it), behind a compressed body that no
    route has read, and behind a stream to an HTTP/1.0 client, which knows no chunks. For `on_response_prepare`."""
    headers = http_request.headers
    is_unread = is_compressed(http_request) and not http_request.content.is_eof()
    is_endless = http_request.version < HttpVersion11 and hdrs.CONTENT_LENGTH not in response.headers
    if http_request.method == hdrs.METH_CONNECT or hdrs.UPGRADE in headers or is_unread or is_endless:
        close(response)
