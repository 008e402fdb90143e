"""The body of POST /abort_requests, as a gateway reads it, and an ingress in front of several."""

from typing import Annotated

import msgspec
from msgspec import Meta

from pipeline.client.protocol import MAX_NAME_CHARS

MAX_IDS = 1024
"""Ids in one request."""

AbortId = Annotated[str, Meta(max_length=MAX_NAME_CHARS + len("chatcmpl-"))]


class AbortBody(msgspec.Struct):
    """POST /abort_requests"""

    request_ids: Annotated[list[AbortId], Meta(max_length=MAX_IDS)]
