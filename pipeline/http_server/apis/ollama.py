"""Ollama's API: the shape of its errors. Pure."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pipeline.http_server.apis.openai import ApiFamily
from pipeline.http_server.errors import ApiError

MEDIA_TYPE = "application/x-ndjson"
MANAGEMENT = ("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete", "/api/blobs")
"""Routes of Ollama's API that download or change models."""


class OllamaErrorBody(msgspec.Struct):
    """Errors of Ollama's API have this shape."""

    error: Annotated[str, Meta(description="It names the invalid field.")]


class OllamaFamily(ApiFamily):
    """/api"""

    path = "/api"
    error_body = OllamaErrorBody
    error_prefix = "Ollama"
    media_type = MEDIA_TYPE
    accepts_curl_default = True
    folds_names = True

    def error_json(self, error: ApiError, request_id: str) -> bytes:
        return error_json(error)

    def waiting(self, path: str, model: str, words: str, unix_s: float) -> bytes:
        """An object without text: Ollama's streams have no comments, and its clients ignore fields that they don't
        know."""
        created_at = datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")
        text = {"response": ""} if path.endswith("/generate") else {"message": {"role": "assistant", "content": ""}}
        fields = {"model": model, "created_at": created_at, **text, "done": False, "status": words}
        return json.dumps(fields).encode() + b"\n"

    def lost_stream(self, fields: Mapping[str, Any]) -> bytes:
        return json.dumps({"error": fields["message"]}).encode() + b"\n"

    def not_found_advice(self, path: str) -> str:
        if not path.startswith(MANAGEMENT):
            return ""
        return (
            ". This server can't download or change models: choose the model when you start it, `pipeline serve MODEL`"
        )


def error_json(error: ApiError) -> bytes:
    """The body of an error response, and the last line of a failed stream."""
    return msgspec.json.encode(OllamaErrorBody(error.text))
