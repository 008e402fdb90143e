"""Bounds the whole head of a request. aiohttp bounds each header and their number, which makes 2 MiB; it keeps the head
while it arrives, while its request is answered, and then until the connection's next request."""

from typing import Any

from aiohttp.http_exceptions import BadHttpMessage

MAX_HEAD_BYTES = 64 * 1024
"""Or two of the largest headers, if that is more. Node's clients and most proxies stop at 16 or 32 KiB."""
KEPT_HEAD_BYTES = 16 * 1024
"""Behind a larger head the connection ends, so that it is not kept while the connection is idle."""
MAX_HEADERS = 128
"""Headers of a request."""
_LINE_BYTES = 4
"""What a header has besides its name and its value."""


class HeadTooLarge(BadHttpMessage):
    """431"""


def max_head_bytes(max_header_bytes: int) -> int:
    """The limit of a head, for that of each of its headers."""
    return max(MAX_HEAD_BYTES, 2 * max_header_bytes)


def head_bytes(message: Any) -> int:
    """Size of the head of a request that aiohttp has read."""
    return len(message.path) + sum(len(name) + len(value) + _LINE_BYTES for name, value in message.raw_headers)
