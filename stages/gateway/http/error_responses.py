"""Error responses: below /v1/messages in the shape of Anthropic's API, below /api in Ollama's, and else in OpenAI's."""

from aiohttp import web

from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.ollama import errors as ollama
from pipeline.stages.gateway.parsing import request_ids
from pipeline.stages.gateway.replies.anthropic.errors import error_json

MESSAGES_PATH = "/v1/messages"
REQUEST_ID = web.RequestKey("request_id", str)
"""The id of an HTTP request's opened request."""
ANTHROPIC_ID_HEADER = "request-id"
"""Its clients read request ids from this header."""


def is_anthropic(path: str) -> bool:
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def error_body(request: web.BaseRequest, error: ApiError) -> bytes:
    """The body of an error response, in the shape of the request's path."""
    if is_anthropic(request.rel_url.raw_path):
        return error_json(error, _request_id(request))
    return ollama.error_json(error) if ollama.is_ollama(request.rel_url.raw_path) else error.json()


def error_response(request: web.BaseRequest, error: ApiError, headers: dict[str, str] | None = None) -> web.Response:
    """An error response, with further `headers`."""
    own = dict(error.headers)
    if is_anthropic(request.rel_url.raw_path) and (request_id := _request_id(request)) is not None:
        own[ANTHROPIC_ID_HEADER] = request_id
    return web.Response(
        status=error.status,
        body=error_body(request, error),
        content_type="application/json",
        headers=own | (headers or {}),
    )


def _request_id(request: web.BaseRequest) -> str | None:
    """The id of the request, if it was opened, or the one that the client chose."""
    if isinstance(request, web.Request) and REQUEST_ID in request:
        return request[REQUEST_ID]
    return request_ids.to_repeat(request.headers)
