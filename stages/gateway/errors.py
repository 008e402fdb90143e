"""Errors as clients see them, with readable messages for the decoder's errors."""

import functools
import math
import re
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect as types

from pipeline.http_server.errors import MAX_SHOWN_CHARS as MAX_SHOWN_CHARS
from pipeline.http_server.errors import ApiError as ApiError
from pipeline.http_server.errors import Overloaded as Overloaded
from pipeline.http_server.errors import invalid as invalid
from pipeline.http_server.errors import overloaded as overloaded
from pipeline.http_server.errors import shown as shown
from pipeline.http_server.errors import timeout_error as timeout_error
from pipeline.http_server.errors import unsupported as unsupported

MAX_SEARCHED_VALUES = 100_000
"""Values of an invalid body that are searched for the wrong one. The search blocks the event loop."""

MAX_SEARCHED_BYTES = 1024**2
"""The search itself takes 40 ns for a byte, and has Python's lock meanwhile: larger bodies are not searched."""
MAX_PROBLEM_CHARS = 4096
"""Of a message of the decoder, which repeats what a client has sent."""

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
_INVALID_TAG = re.compile(r"Invalid value '(.+)'")
"""The `type` of an object is not one of those of its union."""
_INVALID_LITERAL = re.compile(r"Invalid enum value (.+)")
_SOME_KEY = "[...]"
"""msgspec's path for an entry of an object with arbitrary keys."""
_CONSTANT = re.compile(rb"[:,\[]\s*-?(NaN|Infinity)\b")
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_LONE_SURROGATE = "has a lone surrogate"


def _words(names: str) -> str:
    return " or ".join(_TYPES.get(name, name) for name in names.split(" | "))


def of_validation(error: msgspec.ValidationError, kind: Any = None, body: bytes = b"") -> ApiError:
    """The error for JSON that does not match the request's type, from msgspec's message `... - at `$.field``.

    `kind` is the expected struct and `body` the bytes. They add what msgspec leaves out: the values that a field may
    have, and which entry of an object is wrong.
    """
    text = str(error)
    if len(text) > MAX_PROBLEM_CHARS:  # no field's path is as long
        text = text[: MAX_PROBLEM_CHARS // 2] + text[-MAX_PROBLEM_CHARS // 2 :]
    problem, _, path = text.partition(" - at `$")
    param = path.removesuffix("`").removeprefix(".")
    subject = f"'{param}'" if param else "the body"
    if match := _MISSING.fullmatch(problem):
        param = f"{param}.{match[1]}" if param else match[1]
        return invalid(param, f"'{param}' is required")
    if match := _MISMATCH.fullmatch(problem):
        if body and param.endswith(_SOME_KEY):
            param = _with_key(param.removesuffix(_SOME_KEY), match[2], body)
            subject = f"'{param}'"
        return invalid(param or None, f"{subject} must be {_words(match[1])}, not {_words(match[2])}", "invalid_type")
    if match := _INVALID_LITERAL.fullmatch(problem):
        values = _literals(kind).get(param) if kind is not None else None
        must = f"must be one of {', '.join(values)}, not" if values else "can't be"
        return invalid(param or None, f"{subject} {must} {shown(match[1])}", "invalid_value")
    if match := _INVALID_TAG.fullmatch(problem):
        return invalid(param or None, f"{subject}: {shown(match[1])} is not supported by this server", "unsupported")
    if match := _BOUND.fullmatch(problem):
        bounds = match[2] if kind is None else _ranges(kind).get(param, match[2])
        return invalid(param or None, f"{subject} must be {_words(match[1])} {bounds}", "invalid_value")
    return invalid(param or None, f"{subject}: {problem[:1].lower()}{problem[1:]}", "invalid_value")


@functools.cache
def _literals(kind: Any) -> dict[str, list[str]]:
    """Values of a struct's Literal fields, by field."""
    info = types.type_info(kind)
    assert isinstance(info, types.StructType)
    found = {}
    for field in info.fields:
        for one in field.type.types if isinstance(field.type, types.UnionType) else (field.type,):
            inner = one.type if isinstance(one, types.Metadata) else one
            if isinstance(inner, types.LiteralType):
                found[field.encode_name] = [str(value) for value in inner.values]
    return found


_MAX_SHOWN = 2**31
"""A bound this large only protects the server: it is named only to who exceeds it."""


@functools.cache
def _ranges(kind: Any) -> dict[str, str]:
    """Both bounds of numeric fields that have two, of a struct and of the structs in it, by the field's path: msgspec
    names only the one that is missed."""
    info = types.type_info(kind)
    assert isinstance(info, types.StructType)
    return _ranges_in(info, "", nested=True)


def _ranges_in(info: types.StructType, prefix: str, *, nested: bool) -> dict[str, str]:
    found: dict[str, str] = {}
    for field in info.fields:
        for one in field.type.types if isinstance(field.type, types.UnionType) else (field.type,):
            inner = one.type if isinstance(one, types.Metadata) else one
            if isinstance(inner, (types.IntType, types.FloatType)):
                limits = ((">=", inner.ge), (">", inner.gt), ("<=", inner.le), ("<", inner.lt))
                bounds = [
                    f"{sign} {_plain(limit)}" for sign, limit in limits if limit is not None and limit < _MAX_SHOWN
                ]
                if len(bounds) > 1:
                    found[prefix + field.encode_name] = " and ".join(bounds)
            elif isinstance(inner, types.StructType) and nested:
                found |= _ranges_in(inner, f"{prefix}{field.encode_name}.", nested=False)
    return found


def _plain(limit: float) -> str:
    """A bound without an exponent: 1000000, 0.01."""
    return str(int(limit)) if limit == int(limit) else f"{limit:g}"


def _with_key(path: str, got: str, body: bytes) -> str:
    """The path of the first entry of the object at `path` whose type msgspec calls `got`. `path` itself if there is
    none: of keys that the body repeats, the decoder has seen the first and this one sees the last."""
    try:
        at = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # invalid JSON after the entry
        return path
    for step in path.split("."):
        if not isinstance(at, dict) or step not in at:
            return path
        at = at[step]
    for key, value in at.items() if isinstance(at, dict) else ():
        if _JSON_NAMES[type(value)] == got:
            return shown(f"{path}.{key}")
    return path


def of_malformed(error: Exception, body: bytes, loads: Any) -> ApiError:
    """The error for a body that is not JSON. Python clients may write NaN, Infinity and lone surrogates, which are
    not JSON; then the error names the field.

    `loads` is a lenient JSON decoder that accepts them.
    """
    if len(body) <= MAX_SEARCHED_BYTES and (_CONSTANT.search(body) or _ESCAPED_SURROGATE.search(body)):
        try:
            found = _find_invalid(loads(body))
        except (ValueError, RecursionError):
            found = None
        if found is not None:
            param, problem = found
            return invalid(param, f"'{param}' {problem}", "invalid_value")
    if not body:
        return invalid(None, "the request has no body: send a JSON object", "invalid_json")
    return invalid(None, f"the body is not valid JSON: {error}", "invalid_json")


def _find_invalid(root: Any) -> tuple[str, str] | None:
    """Return the path of the first value that is not valid JSON, and what is wrong with it; None if there is none among
    the first MAX_SEARCHED_VALUES."""
    # One iterator for each open container: memory is proportional to the depth.
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
                    return _path([*keys, key]), _LONE_SURROGATE
            if isinstance(key, str) and _SURROGATE.search(key):
                return _path([*keys, key]), _LONE_SURROGATE
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
    """The path of a field: `a.b[2]`. Keys come from the client, so they may be long, or not valid Unicode."""
    path = ""
    for key in keys:
        path += f"[{key}]" if isinstance(key, int) else f".{key[:MAX_SHOWN_CHARS]}" if path else key[:MAX_SHOWN_CHARS]
        if len(path) > MAX_SHOWN_CHARS:
            break
    return shown(path.encode(errors="backslashreplace").decode())
