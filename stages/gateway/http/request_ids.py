"""Clients' own names for their calls: a header, X-Request-Id, or a field of the body, request_id, as vLLM has them;
over ZeroMQ a field of `generate`, name.

A response's id then ends in the name, the header comes back with every response, and the call can be ended by it.
"""

import re
from collections.abc import Mapping

from pipeline.client.protocol import MAX_NAME_CHARS
from pipeline.stages.gateway.errors import invalid

HEADER = "X-Request-Id"
_NAME = re.compile(rf"[!-~]{{1,{MAX_NAME_CHARS}}}")


def checked(name: str | None, param: str) -> str | None:
    """A name that fits a header and a log line. Raises ApiError, 400, where it doesn't."""
    if name is not None and not _NAME.fullmatch(name):
        message = f"'{param}' must be 1 to {MAX_NAME_CHARS} visible ASCII characters without spaces"
        raise invalid(param, message, "invalid_value")
    return name


def of_headers(headers: Mapping[str, str]) -> str | None:
    """The name that a request's header gives it. Raises ApiError as `checked`."""
    return checked(headers.get(HEADER), HEADER)


def to_repeat(headers: Mapping[str, str]) -> str | None:
    """What a response's header says again: nothing where it can't be said."""
    name = headers.get(HEADER)
    return name if name is not None and _NAME.fullmatch(name) else None
