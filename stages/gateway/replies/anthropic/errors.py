"""Errors in the shape of Anthropic's Messages API. Pure."""

from http import HTTPStatus

import msgspec

from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.replies.anthropic.types import MessagesErrorBody, MessagesErrorFields

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


def type_of(status: int) -> str:
    return TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


def error_json(error: ApiError, request_id: str | None) -> bytes:
    """The body of an error response, and the data of an error event."""
    return msgspec.json.encode(MessagesErrorBody(MessagesErrorFields(type_of(error.status), error.text), request_id))
