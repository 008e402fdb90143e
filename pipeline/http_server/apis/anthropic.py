"""Anthropic's Messages API: the shape of its errors, and its headers. Pure."""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from pipeline.http_server.apis.openai import ApiFamily, LimitUse
from pipeline.http_server.errors import ApiError

ID_HEADER = "request-id"
"""Its clients read request ids from this header."""

OVERLOADED = 529
"""Anthropic's own status; this server sends 503."""
TYPES: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_TIMEOUT: "timeout_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
    OVERLOADED: "overloaded_error",
}
"""Types by status. Others below 500 are invalid_request_error, and from 500 on api_error."""

THREAD, UNSUPPORTED = "thread", "unsupported"
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
_PROMPT = re.compile(r"maximum context length is (\d+) tokens, and the prompt has ((?:more than )?\d+)")
_WITH_MAX_TOKENS = re.compile(r"maximum context length is (\d+) tokens; .*: (\d+) in the prompt and (\d+) to generate")
"""The server's own messages, by which Anthropic's are chosen."""


class MessagesErrorDetails(msgspec.Struct):
    """What a client needs to repeat the request in another way."""

    error_code: str
    unsupported: list[str]


class MessagesErrorFields(msgspec.Struct):
    """The error."""

    type: str
    message: Annotated[str, Meta(description="It names the invalid field.")]
    details: (
        Annotated[MessagesErrorDetails, Meta(description="Only of requests with thread, which is not supported.")]
        | UnsetType
    ) = UNSET


class MessagesErrorBody(msgspec.Struct, tag_field="type", tag="error"):
    """Errors of Anthropic's API have this shape."""

    error: MessagesErrorFields
    request_id: str


class AnthropicFamily(ApiFamily):
    """/v1/messages"""

    path = "/v1/messages"
    error_body = MessagesErrorBody
    error_prefix = "Messages"
    id_header = ID_HEADER

    def error_json(self, error: ApiError, request_id: str) -> bytes:
        return error_json(error, request_id)

    def lost_stream(self, fields: Mapping[str, Any]) -> bytes:
        data = {"type": "error", "error": {"type": "api_error", "message": fields["message"]}}
        return b"event: error\ndata: " + json.dumps(data).encode() + b"\n\n"

    def limit_headers(self, uses: Sequence[LimitUse]) -> dict[str, str]:
        found: dict[str, str] = {}
        for use in uses:
            reset = (datetime.now(UTC) + timedelta(seconds=use.reset_s)).strftime("%Y-%m-%dT%H:%M:%SZ")
            values = {"limit": str(use.limit), "remaining": str(use.remaining), "reset": reset}
            found |= {f"anthropic-ratelimit-{use.what}-{name}": value for name, value in values.items()}
        return found


def type_of(status: int) -> str:
    return TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


def error_json(error: ApiError, request_id: str) -> bytes:
    """The body of an error response, and the data of an error event."""
    fields = MessagesErrorFields(type_of(error.status), _message(error), _details(error))
    return msgspec.json.encode(MessagesErrorBody(fields, request_id))


def _details(error: ApiError) -> MessagesErrorDetails | UnsetType:
    """The tool runners of Anthropic's clients try `thread`, a conversation that the server holds. With these details
    they repeat the request without it."""
    if (error.param, error.code) != (THREAD, UNSUPPORTED):
        return UNSET
    return MessagesErrorDetails("thread_unsupported_request", [THREAD])


def _message(error: ApiError) -> str:
    """The message. Agents search for Anthropic's words if a prompt does not fit into the context: they compact their
    conversation, or repeat the request with a smaller `max_tokens`."""
    if error.code == CONTEXT_LENGTH_EXCEEDED:
        if found := _PROMPT.search(error.message):
            return f"prompt is too long: {found[2]} tokens > {found[1]} maximum"
        if found := _WITH_MAX_TOKENS.search(error.message):
            numbers = f"{found[2]} + {found[3]} > {found[1]}"
            return f"input length and `max_tokens` exceed context limit: {numbers}, decrease either of them"
    return error.text
