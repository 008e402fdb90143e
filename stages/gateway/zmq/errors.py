"""Errors on the client wire."""

import re
from http import HTTPStatus
from typing import Any, get_args, get_type_hints

import msgspec

from pipeline.client import protocol as p
from pipeline.stages.gateway.errors import ApiError, shown

_INDEX = re.compile(r"\[(\d+|\.\.\.)\]")
_TAGS = {member.__struct_config__.tag: member for member in get_args(p.ClientMessage)}


def on_the_wire(error: ApiError) -> p.Failure:
    """An error in the wire's shape."""
    return p.Failure(int(error.status), error.message, error.param, error.code, error.retry_after_s)


def of_peer(message: str, code: str) -> ApiError:
    """What costs a client its connection: it does not keep to the protocol."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, code=code)


def of_malformed(data: bytes | bytearray, error: Exception) -> ApiError:
    """Bytes that are no message of a client. msgspec counts the places of an array; say which fields they are."""
    complaint, _, path = str(error).partition(" - at `$")
    field = _field(data, _INDEX.findall(path))
    where = f"{field}: " if field else ""
    return ApiError(HTTPStatus.BAD_REQUEST, shown(f"malformed message: {where}{complaint}"), field or None, "malformed")


def _field(data: bytes | bytearray, places: list[str]) -> str:
    """The name of the field at a path of array places, as far down as types are certain."""
    try:
        tag = msgspec.msgpack.decode(data, type=tuple[str, ...] if len(places) == 0 else list[Any])[0]
        kind: Any = _TAGS.get(tag)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, IndexError, TypeError):
        return ""
    names: list[str] = []
    for place in places:
        if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)) or not place.isdigit():
            break
        number = int(place) - (kind.__struct_config__.tag is not None)
        if not 0 <= number < len(kind.__struct_fields__):
            break
        name = kind.__struct_fields__[number]
        names.append(name)
        kind = get_type_hints(kind)[name]
    return ".".join([str(tag), *names]) if names else ""
