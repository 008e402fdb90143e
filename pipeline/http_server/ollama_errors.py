"""Errors in the shape of Ollama's API. Pure."""

from typing import Annotated

import msgspec
from msgspec import Meta

from pipeline.http_server.errors import ApiError

PREFIX = "/api/"
MANAGEMENT = ("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete", "/api/blobs")
"""Routes of Ollama's API that download or change models."""


class OllamaErrorBody(msgspec.Struct):
    """Errors of Ollama's API have this shape."""

    error: Annotated[str, Meta(description="It names the invalid field.")]


def is_ollama(path: str) -> bool:
    """Whether a path belongs to Ollama's API."""
    return path.startswith(PREFIX)


def not_found_advice(path: str) -> str:
    """What to do instead of a request to a route that is not there; empty for most."""
    if not path.startswith(MANAGEMENT):
        return ""
    return ". This server can't download or change models: choose the model when you start it, `pipeline serve MODEL`"


def error_json(error: ApiError) -> bytes:
    """The body of an error response, and the last line of a failed stream."""
    return msgspec.json.encode(OllamaErrorBody(error.text))
