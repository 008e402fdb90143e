"""Ends of requests that can't be served, and how a broken stream says so. Pure."""

import json
from collections.abc import Mapping
from http import HTTPStatus


class RelayError(Exception):
    """The end of a request that can't be served."""

    def __init__(self, message: str, code: str, status: int = HTTPStatus.SERVICE_UNAVAILABLE) -> None:
        super().__init__(message)
        self.message, self.code, self.status = message, code, status


def error_event(kind: str, path: str, fields: Mapping[str, object]) -> bytes:
    """The end of a broken stream, in the form of its API."""
    if kind == "application/x-ndjson":
        return json.dumps({"error": fields["message"]}).encode() + b"\n"
    if path.endswith("/v1/messages"):
        data = json.dumps({"type": "error", "error": {"type": "api_error", "message": fields["message"]}})
        return f"event: error\ndata: {data}\n\n".encode()
    if path.startswith("/v1/responses"):
        data = json.dumps({"type": "error", "code": fields["code"], "message": fields["message"], "param": None})
        return f"event: error\ndata: {data}\n\n".encode()
    return b"data: " + json.dumps({"error": fields}).encode() + b"\n\ndata: [DONE]\n\n"
