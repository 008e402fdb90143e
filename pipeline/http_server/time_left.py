"""The header by which an ingress says how long a request may still take, with each attempt that it makes.

A server's own limits hold all the same: the header can only bring the end of its own request nearer, so any client may
send it.
"""

import math
import re
from collections.abc import Mapping

from pipeline.client.protocol import MAX_TIMEOUT_S
from pipeline.http_server.errors import invalid

HEADER = "X-Pipeline-Timeout"
_SECONDS = re.compile(r"[0-9]{1,7}(\.[0-9]{1,6})?")


def of_headers(headers: Mapping[str, str]) -> float:
    """Seconds that a request may take from its arrival here; infinite if the header is missing. Raises ApiError,
    400."""
    text = headers.get(HEADER)
    if text is None:
        return math.inf
    if not _SECONDS.fullmatch(text) or not 0 < float(text) <= MAX_TIMEOUT_S:
        message = f"'{HEADER}' must be a number of seconds above 0, at most {MAX_TIMEOUT_S}"
        raise invalid(HEADER, message, "invalid_value")
    return float(text)


def written(left_s: float) -> str:
    """The value of the header."""
    return f"{min(max(left_s, 0.001), MAX_TIMEOUT_S):.3f}"
