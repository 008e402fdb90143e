"""The bodies of the routes that act on open requests by their ids, as a gateway reads them, and an ingress in front of
several."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pipeline.client.protocol import MAX_NAME_CHARS

MAX_IDS = 1024
"""Ids in one request."""

MAX_ABORT_ID_CHARS = MAX_NAME_CHARS + len("chatcmpl-")
AbortId = Annotated[str, Meta(max_length=MAX_ABORT_ID_CHARS)]


class AbortBody(msgspec.Struct):
    """POST /abort_requests"""

    request_ids: Annotated[list[AbortId], Meta(max_length=MAX_IDS)]


class ControlBody(msgspec.Struct):
    """POST /v1/chat/completions/control, and with the id in the path"""

    action: Annotated[Literal["reasoning_end"], Meta(description="The reasoning ends, and the answer follows.")]
    id: Annotated[AbortId, Meta(description="The id of the running reply, if the path does not have it.")] | None = None
