"""Errors in the shape of Ollama's API. Pure."""

import msgspec

from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.ollama.types import OllamaErrorBody

PREFIX = "/api/"


def is_ollama(path: str) -> bool:
    """Whether a path belongs to Ollama's API."""
    return path.startswith(PREFIX)


def error_json(error: ApiError) -> bytes:
    """The body of an error response, and the last line of a failed stream."""
    return msgspec.json.encode(OllamaErrorBody(error.text))
