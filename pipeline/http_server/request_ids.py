"""Request ids that clients choose: the header X-Request-Id or the body's request_id, as in vLLM; `name` over ZeroMQ.

The id of the response then ends in it, the response repeats the header, and the request can be aborted by it.
"""

import re
from collections.abc import Mapping

from pipeline.client.protocol import MAX_NAME_CHARS
from pipeline.http_server.errors import invalid

HEADER = "X-Request-Id"
_NAME = re.compile(rf"[!-~]{{1,{MAX_NAME_CHARS}}}")


def checked(name: str | None, param: str) -> str | None:
    """Check that a request id fits a header and a log line. Raises ApiError, 400."""
    if name is not None and not _NAME.fullmatch(name):
        message = f"'{param}' must be 1 to {MAX_NAME_CHARS} visible ASCII characters without spaces"
        raise invalid(param, message, "invalid_value")
    return name


def of_headers(headers: Mapping[str, str]) -> str | None:
    """The request id in the headers. Raises ApiError as `checked`."""
    return checked(headers.get(HEADER), HEADER)


def to_repeat(headers: Mapping[str, str]) -> str | None:
    """The request id to repeat in the response; None if it is invalid."""
    name = headers.get(HEADER)
    return name if name is not None and _NAME.fullmatch(name) else None
