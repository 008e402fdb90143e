"""Error responses: below /v1/messages in the shape of Anthropic's API, below /api in Ollama's, and else in OpenAI's."""

import secrets

from aiohttp import web

from pipeline.http_server import ollama_errors as ollama
from pipeline.http_server import request_ids
from pipeline.http_server.anthropic_errors import error_json
from pipeline.http_server.errors import ApiError

MESSAGES_PATH = "/v1/messages"
REQUEST_ID = web.RequestKey("request_id", str)
"""The id of an HTTP request's opened request."""
ERROR = web.ResponseKey("error", ApiError)
"""The error of an error response."""
ANTHROPIC_ID_HEADER = "request-id"
"""Its clients read request ids from this header."""


def is_anthropic(path: str) -> bool:
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def error_parts(request: web.BaseRequest, error: ApiError) -> tuple[bytes, dict[str, str]]:
    """The body of an error response, in the shape of the request's path, and its headers."""
    path, headers = request.rel_url.raw_path, error.headers
    if is_anthropic(path):
        request_id = _request_id(request)
        return error_json(error, request_id), headers | {ANTHROPIC_ID_HEADER: request_id}
    return ollama.error_json(error) if ollama.is_ollama(path) else error.json(), headers


def error_response(request: web.BaseRequest, error: ApiError, headers: dict[str, str] | None = None) -> web.Response:
    """An error response, with further `headers`."""
    body, own = error_parts(request, error)
    response = web.Response(
        status=error.status, body=body, content_type="application/json", headers=own | (headers or {})
    )
    response[ERROR] = error
    _forget_frames(error)
    return response


def _forget_frames(error: BaseException) -> None:
    """The response keeps its error until the client has taken it. The frames of the error, and of all errors that led
    to it, would keep the request's body as long. An error that was raised again may be its own cause."""
    found: dict[int, BaseException] = {}
    queue: list[BaseException | None] = [error]
    while queue:
        if (one := queue.pop()) is not None and id(one) not in found:
            found[id(one)] = one
            one.__traceback__ = None
            queue += one.__cause__, one.__context__
            if isinstance(one, BaseExceptionGroup):
                queue += one.exceptions


def _request_id(request: web.BaseRequest) -> str:
    """The id of the request, if it was opened, or the one that the client chose, or else a new one."""
    return request.get(REQUEST_ID) or request_ids.to_repeat(request.headers) or f"req_{secrets.token_hex(12)}"
