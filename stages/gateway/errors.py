"""Errors as clients see them: OpenAI's shape, and the user's words for what a decoder says."""

import math
import re
from http import HTTPStatus
from typing import Any

import msgspec

from pipeline import messages as m

RETRY_AFTER_S = 1
"""What a client that is told 503 is asked to wait."""


class _Error(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class _ErrorBody(msgspec.Struct, frozen=True):
    error: _Error


class ApiError(Exception):
    """A request that ends with an error. `param` is the path of the field to blame, as `messages[0].content`."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    @classmethod
    def of(cls, failure: m.Failure) -> "ApiError":
        return cls(failure.status, failure.message, failure.param, failure.code)

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(RETRY_AFTER_S)} if self.status == HTTPStatus.SERVICE_UNAVAILABLE else {}

    def json(self) -> bytes:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return msgspec.json.encode(_ErrorBody(_Error(self.message, kind, self.param, self.code)))


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """400, and the field to blame."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, param, code)


def unsupported(param: str, what: str = "") -> ApiError:
    """400 for what the OpenAI API knows and this server can't do yet: never silently ignored."""
    return invalid(param, f"'{param}' is not supported by this server{': ' + what if what else ''}", "unsupported")


# ------------------------------------------------------------------------------------------- the decoder's complaints

_TYPES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "an array",
    "object": "an object",
    "null": "null",
}
_MISSING = re.compile(r"Object missing required field `(.+)`")
_MISMATCH = re.compile(r"Expected `(.+)`, got `(.+)`")
_BOUND = re.compile(r"Expected `(.+)` (.+)")
_CONSTANT = re.compile(rb"[:,\[]\s*-?(NaN|Infinity)\b")


def _words(types: str) -> str:
    return " or ".join(_TYPES.get(name, name) for name in types.split(" | "))


def of_validation(error: msgspec.ValidationError) -> ApiError:
    """A body that is JSON but not the request it should be: msgspec's `... - at `$.field`` in the user's words."""
    complaint, _, path = str(error).partition(" - at `$")
    param = path.removesuffix("`").removeprefix(".")
    subject = f"'{param}'" if param else "the body"
    if match := _MISSING.fullmatch(complaint):
        param = f"{param}.{match[1]}" if param else match[1]
        return invalid(param, f"'{param}' is required")
    if match := _MISMATCH.fullmatch(complaint):
        return invalid(param or None, f"{subject} must be {_words(match[1])}, not {_words(match[2])}", "invalid_type")
    if match := _BOUND.fullmatch(complaint):
        return invalid(param or None, f"{subject} must be {_words(match[1])} {match[2]}", "invalid_value")
    return invalid(param or None, f"{subject}: {complaint[:1].lower()}{complaint[1:]}", "invalid_value")


def of_malformed(error: Exception, body: bytes, loads: Any) -> ApiError:
    """A body that is not JSON. Clients in Python write NaN and Infinity, which are not JSON: name the field then.

    `loads` is a lenient JSON decoder that takes them.
    """
    if _CONSTANT.search(body):
        try:
            param = _find_not_finite(loads(body))
        except (ValueError, RecursionError):
            param = None
        if param is not None:
            return invalid(param, f"'{param}' must be a finite number", "invalid_value")
    return invalid(None, f"the body is not valid JSON: {error}", "invalid_json")


def _find_not_finite(root: Any) -> str | None:
    """The path of the first number that is not finite."""
    stack: list[tuple[str, Any]] = [("", root)]
    while stack:
        path, value = stack.pop()
        match value:
            case float() if not math.isfinite(value):
                return path or None
            case dict():
                stack += [(f"{path}.{key}" if path else str(key), item) for key, item in reversed(value.items())]
            case list():
                stack += [(f"{path}[{i}]", item) for i, item in reversed(list(enumerate(value)))]
    return None
