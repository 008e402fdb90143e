"""Errors as clients see them: OpenAI's shape, and the user's words for what a decoder says."""

import functools
import math
import re
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import msgspec
from msgspec import inspect as types

RETRY_AFTER_S = 1
"""What a client that is told 503 is asked to wait where nobody knows better."""
MAX_SHOWN_CHARS = 200
"""The most of a client's own words that an error repeats."""
MAX_SEARCHED_VALUES = 100_000
"""Values of a body that is no JSON among which the one to blame is looked for, while nobody else is served."""


def shown(words: str) -> str:
    """A client's words as an error repeats them."""
    return words if len(words) <= MAX_SHOWN_CHARS else words[: MAX_SHOWN_CHARS - 1] + "…"


class ErrorFields(msgspec.Struct, frozen=True):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """Every error has this shape."""

    error: ErrorFields


class ApiError(Exception):
    """A request that ends with an error. `param` is the path of the field to blame, as `messages[0].content`."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int = RETRY_AFTER_S,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s if status == HTTPStatus.SERVICE_UNAVAILABLE else None

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}

    def json(self) -> bytes:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return msgspec.json.encode(ErrorBody(ErrorFields(self.message, kind, self.param, self.code)))


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """400, and the field to blame."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, param, code)


def overloaded(why: str, retry_after_s: int = RETRY_AFTER_S) -> ApiError:
    """503"""
    message = f"the server is overloaded: {why}"
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="overloaded", retry_after_s=retry_after_s)


ENCODINGS = ("identity", "gzip", "deflate")
"""How bodies may be packed."""


def unsupported_encoding(encoding: str) -> ApiError:
    """415"""
    what = f"a body in '{shown(encoding)}'" if encoding else "a body in this encoding"
    message = f"{what} can't be read, only in {', '.join(ENCODINGS)}"
    return ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message, code="unsupported_encoding")


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
_JSON_NAMES: dict[type, str] = {
    int: "int",
    float: "float",
    str: "str",
    bool: "bool",
    list: "array",
    dict: "object",
    type(None): "null",
}
_MISSING = re.compile(r"Object missing required field `(.+)`")
_MISMATCH = re.compile(r"Expected `(.+)`, got `(.+)`")
_BOUND = re.compile(r"Expected `(.+)` (.+)")
_NO_LITERAL = re.compile(r"Invalid enum value (.+)")
_SOME_KEY = "[...]"
"""What msgspec calls an entry of an object that may have any names."""
_CONSTANT = re.compile(rb"[:,\[]\s*-?(NaN|Infinity)\b")
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_HALF_PAIR = "has half a surrogate pair, which is no character"


def _words(names: str) -> str:
    return " or ".join(_TYPES.get(name, name) for name in names.split(" | "))


def of_validation(error: msgspec.ValidationError, kind: Any = None, body: bytes = b"") -> ApiError:
    """A body that is JSON but not the request it should be: msgspec's `... - at `$.field`` in the user's words.

    `kind` is the struct it should be, and `body` what was read, for what msgspec leaves out: the values that a field
    may have, and which entry of an object is wrong.
    """
    complaint, _, path = str(error).partition(" - at `$")
    param = path.removesuffix("`").removeprefix(".")
    subject = f"'{param}'" if param else "the body"
    if match := _MISSING.fullmatch(complaint):
        param = f"{param}.{match[1]}" if param else match[1]
        return invalid(param, f"'{param}' is required")
    if match := _MISMATCH.fullmatch(complaint):
        if body and param.endswith(_SOME_KEY):
            param = _with_key(param.removesuffix(_SOME_KEY), match[2], body)
            subject = f"'{param}'"
        return invalid(param or None, f"{subject} must be {_words(match[1])}, not {_words(match[2])}", "invalid_type")
    if (match := _NO_LITERAL.fullmatch(complaint)) and kind is not None and param in (values := _literals(kind)):
        message = f"{subject} must be one of {', '.join(values[param])}, not {shown(match[1])}"
        return invalid(param, message, "invalid_value")
    if match := _BOUND.fullmatch(complaint):
        return invalid(param or None, f"{subject} must be {_words(match[1])} {match[2]}", "invalid_value")
    return invalid(param or None, f"{subject}: {complaint[:1].lower()}{complaint[1:]}", "invalid_value")


@functools.cache
def _literals(kind: Any) -> dict[str, list[str]]:
    """Fields of a struct that have one of a few values, and these."""
    info = types.type_info(kind)
    assert isinstance(info, types.StructType)
    found = {}
    for field in info.fields:
        for one in field.type.types if isinstance(field.type, types.UnionType) else (field.type,):
            inner = one.type if isinstance(one, types.Metadata) else one
            if isinstance(inner, types.LiteralType):
                found[field.encode_name] = [str(value) for value in inner.values]
    return found


def _with_key(path: str, got: str, body: bytes) -> str:
    """The path of the first entry of the object at `path` that is of the type that msgspec calls `got`."""
    try:
        at = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # behind the entry it is no JSON
        return path
    for step in path.split("."):
        at = at[step]
    for key, value in at.items():
        if _JSON_NAMES[type(value)] == got:
            return shown(f"{path}.{key}")
    return path


def of_malformed(error: Exception, body: bytes, loads: Any) -> ApiError:
    """A body that is not JSON. Clients in Python write NaN, Infinity and halves of surrogate pairs, which are not JSON:
    name the field then.

    `loads` is a lenient JSON decoder that takes them.
    """
    if _CONSTANT.search(body) or _ESCAPED_SURROGATE.search(body):
        try:
            found = _find_no_json(loads(body))
        except (ValueError, RecursionError):
            found = None
        if found is not None:
            param, complaint = found
            return invalid(param, f"'{param}' {complaint}", "invalid_value")
    return invalid(None, f"the body is not valid JSON: {error}", "invalid_json")


def _find_no_json(root: Any) -> tuple[str, str] | None:
    """The first value that JSON can't hold, though `loads` takes it: its path, and what is wrong with it. None where
    none of the first MAX_SEARCHED_VALUES is such."""
    # One iterator for each container on the way down, so that memory goes with the depth and not with the siblings.
    keys: list[str | int] = []
    levels = [_items(root)]
    num_left = MAX_SEARCHED_VALUES
    while levels:
        for key, value in levels[-1]:
            if (num_left := num_left - 1) < 0:
                return None
            match value:
                case float() if not math.isfinite(value):
                    return _path([*keys, key]), "must be a finite number"
                case str() if _SURROGATE.search(value):
                    return _path([*keys, key]), _HALF_PAIR
            if isinstance(key, str) and _SURROGATE.search(key):
                return _path([*keys, key]), _HALF_PAIR
            if isinstance(value, (dict, list)):
                keys.append(key)
                levels.append(_items(value))
                break
        else:
            levels.pop()
            del keys[-1:]
    return None


def _items(container: Any) -> Iterator[tuple[str | int, Any]]:
    match container:
        case dict():
            return iter(container.items())
        case list():
            return enumerate(container)
        case _:
            return iter(())


def _path(keys: list[str | int]) -> str:
    """How a client finds the field: `a.b[2]`. Keys are the client's own, so they may be long, or no text at all."""
    path = ""
    for key in keys:
        path += f"[{key}]" if isinstance(key, int) else f".{key[:MAX_SHOWN_CHARS]}" if path else key[:MAX_SHOWN_CHARS]
        if len(path) > MAX_SHOWN_CHARS:
            break
    return shown(path.encode(errors="backslashreplace").decode())
