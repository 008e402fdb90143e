"""Error responses, in the shape of the API that the request's path belongs to."""

import secrets
from http import HTTPStatus

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage, ContentEncodingError, HttpProcessingError, LineTooLong

from pipeline.http_server import request_ids
from pipeline.http_server.apis.table import family_of
from pipeline.http_server.errors import ApiError, shown, unsupported_encoding
from pipeline.http_server.head_limit import MAX_HEADERS, HeadTooLarge

REQUEST_ID = web.RequestKey("request_id", str)
"""The id of an HTTP request's opened request."""
ERROR = web.ResponseKey("error", ApiError)
"""The error of an error response."""


def error_parts(request: web.BaseRequest, error: ApiError) -> tuple[bytes, dict[str, str]]:
    """The body of an error response, in the shape of the request's API, and its headers."""
    family = family_of(request.rel_url.raw_path)
    request_id = _request_id(request)
    headers = {family.id_header: request_id} if family.id_header else {}
    return family.error_json(error, request_id), error.headers | headers


def error_response(request: web.BaseRequest, error: ApiError, headers: dict[str, str] | None = None) -> web.Response:
    """An error response, with further `headers`."""
    body, own = error_parts(request, error)
    response = web.Response(
        status=error.status, body=body, content_type="application/json", headers=own | (headers or {})
    )
    response[ERROR] = error
    _forget_frames(error)
    return response


def id_in_headers(request: web.BaseRequest, response: web.StreamResponse) -> str | None:
    """The id in the header that the request's API has for it."""
    return response.headers.get(family_of(request.rel_url.raw_path).id_header)


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


def error_of_parser(status: int, exc: BaseException | None) -> ApiError:
    """The error for a request that aiohttp can't parse, or for an exception in a route."""
    match exc:
        case LineTooLong():
            return ApiError(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "a line of the request's head is too long", code="too_large"
            )
        case HeadTooLarge(message=message):
            return ApiError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message, code="too_large")
        case BadHttpMessage(message=message) if message.startswith("Too many headers"):
            return ApiError(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"a request may have at most {MAX_HEADERS} headers",
                code="too_large",
            )
        case ContentEncodingError(message=message) if "install" in message:  # it names a package to install
            return unsupported_encoding("")
        case HttpProcessingError():
            lines = exc.message.partition("\n")[0].rstrip(":")
            return ApiError(status, f"cannot read the request: {shown(lines)}", code="invalid_http")
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "internal server error")
