"""Errors on the ZeroMQ wire."""

import re
from http import HTTPStatus
from typing import Any, get_args, get_type_hints

import msgspec

from pipeline.client import protocol as p
from pipeline.stages.gateway.errors import ApiError, shown
from pipeline.version import VERSION

_INDEX = re.compile(r"\[(\d+|\.\.\.)\]")
_TAGS = {member.__struct_config__.tag: member for member in get_args(p.ClientMessage)}


class _Head(msgspec.Struct, array_like=True, frozen=True):
    """What a malformed message begins with. Nothing is made of the rest, which may be a million objects."""

    tag: str


def on_the_wire(error: ApiError) -> p.Failure:
    """Convert an error to the wire's struct."""
    return p.Failure(int(error.status), error.message, error.param, error.code, error.retry_after_s)


def of_peer(message: str, code: str) -> ApiError:
    """A protocol error, which ends the client's connection."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, code=code)


def of_version(hello: p.Hello) -> ApiError:
    """The error for a client that does not speak this server's version of the protocol."""
    low, high = hello.min_version, hello.max_version
    versions = f"version {low}" if low == high else f"versions {low} to {high}"
    older = "client" if high < p.PROTOCOL_VERSION else "server"
    message = (
        f"this server (Pipeline {VERSION}) speaks version {p.PROTOCOL_VERSION} of the ZeroMQ protocol, and the client "
        f"{versions}: update the {older}, or use the HTTP API"
    )
    return of_peer(message, "unsupported_version")


def of_malformed(data: bytes | bytearray, error: Exception) -> ApiError:
    """The error for bytes that are not a client message. msgspec reports array indexes; name the fields instead."""
    problem, _, path = str(error).partition(" - at `$")
    field = _field(data, _INDEX.findall(path))
    where = f"{field}: " if field else ""
    return ApiError(HTTPStatus.BAD_REQUEST, shown(f"malformed message: {where}{problem}"), field or None, "malformed")


def _field(data: bytes | bytearray, path: list[str]) -> str:
    """The name of the field at a path of array indexes, as deep as the types are known."""
    try:
        tag = msgspec.msgpack.decode(data, type=_Head).tag
        kind: Any = _TAGS.get(tag)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    names: list[str] = []
    for step in path:
        if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)) or not step.isdigit():
            break
        number = int(step) - (kind.__struct_config__.tag is not None)
        if not 0 <= number < len(kind.__struct_fields__):
            break
        name = kind.__struct_fields__[number]
        names.append(name)
        kind = get_type_hints(kind)[name]
    return ".".join([str(tag), *names]) if names else ""
