"""OpenAI's API: the shape of its errors, and its headers. Pure."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import msgspec

from pipeline.http_server.errors import ApiError

LIMITED = ("requests", "tokens")
"""What an API key has limits of, per minute."""


class ErrorFields(msgspec.Struct, frozen=True):
    """The error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """Every error has this shape."""

    error: ErrorFields


class LimitUse(NamedTuple):
    """What a key may still use."""

    what: str
    """One of `LIMITED`"""
    limit: int
    remaining: int
    reset_s: float
    """Until all of it is free again."""


class ApiFamily:
    """OpenAI's API. The others override what differs."""

    path: ClassVar[str] = ""
    """Its route: those below it belong to it too. Paths that no other API has are OpenAI's."""
    error_body: ClassVar[type[msgspec.Struct]] = ErrorBody
    error_prefix: ClassVar[str] = ""
    """Of the names of its errors in the description of the API."""
    media_type: ClassVar[str] = "text/event-stream"
    """Of its streams."""
    id_header: ClassVar[str] = ""
    """Where its clients read the id of a request, besides X-Request-Id."""
    accepts_curl_default: ClassVar[bool] = False
    """The examples of its documentation are `curl -d` without a content type."""
    folds_names: ClassVar[bool] = False
    """The names of models are compared without regard to case and to a tag."""
    stores_replies: ClassVar[bool] = False
    """Clients name stored replies: what one replica does not know, another may."""

    def error_json(self, error: ApiError, request_id: str) -> bytes:
        """The body of an error response."""
        return error_json(error)

    def waiting(self, path: str, model: str, words: str, unix_s: float) -> bytes:
        """What a stream says without output while its model is loaded, or sleeps: `words`, which clients ignore that
        don't know them. `model` is its name in the request."""
        return f": {words}\n\n".encode()

    def lost_stream(self, fields: Mapping[str, Any]) -> bytes:
        """The end of a stream that the ingress can't continue, or whose model can't be loaded. `fields` are those of
        `ErrorFields`."""
        return b"data: " + json.dumps({"error": fields}).encode() + b"\n\ndata: [DONE]\n\n"

    def limit_headers(self, uses: Sequence[LimitUse]) -> dict[str, str]:
        """What a response says about the limits of its key."""
        found: dict[str, str] = {}
        for use in uses:
            values = {"limit": str(use.limit), "remaining": str(use.remaining), "reset": duration(use.reset_s)}
            found |= {f"x-ratelimit-{name}-{use.what}": value for name, value in values.items()}
        return found

    def not_found_advice(self, path: str) -> str:
        """What to do instead of a request to a route that is not there, as the rest of a sentence; empty for most."""
        return ""

    @property
    def own_headers(self) -> list[str]:
        """Names of the headers that only responses of such an API may have."""
        return [*filter(None, [self.id_header]), *self.limit_headers([LimitUse(what, 0, 0, 0.0) for what in LIMITED])]


def error_json(error: ApiError) -> bytes:
    """The body of an error response, and the data of an error event."""
    return msgspec.json.encode(ErrorBody(ErrorFields(error.message, error.kind, error.param, error.code)))


def duration(seconds: float) -> str:
    """As OpenAI writes it: 250ms, 1.5s, 1m0s"""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < 60:
        return f"{math.ceil(seconds * 10) / 10:g}s"
    return f"{int(seconds) // 60}m{int(seconds) % 60}s"
