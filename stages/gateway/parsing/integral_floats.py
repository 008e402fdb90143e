"""Integral floats for integer fields: clients in languages with one type of number send 3.0 for 3. Pure.

msgspec refuses them, so a body is decoded as it is first, and rewritten only if an integer field has a float. Only the
values of integer fields change. All others keep their bytes, such as a schema or the arguments of a chat template.
"""

import functools
from typing import Any

import msgspec
from msgspec import inspect as types

MAX_EXACT = 2.0**53
"""Floats from here on are not exact, so they stay floats and are refused."""

Kinds = tuple[types.Type, ...]
"""The alternatives of a field's type."""

_objects = msgspec.json.Decoder(dict[str, msgspec.Raw])
_arrays = msgspec.json.Decoder(list[msgspec.Raw])


def with_integers(body: bytes, kind: Any) -> bytes:
    """The body with integers instead of integral floats, in fields that `kind`, a struct, declares as integers. The
    body itself if it is not JSON."""
    try:
        return _rewritten(body.strip(), _kinds_of(kind))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return body


def _rewritten(raw: bytes, kinds: Kinds) -> bytes:
    match raw[:1]:
        case b"{":
            fields = _fields(kinds)
            if not fields:
                return raw
            values = _objects.decode(raw)
            for name in fields.keys() & values.keys():
                values[name] = msgspec.Raw(_rewritten(bytes(values[name]), fields[name]))
            return msgspec.json.encode(values)
        case b"[":
            items = _items(kinds)
            if not _have_integers(items):
                return raw
            if any(isinstance(item, types.StructType | types.DictType) for item in items):
                return msgspec.json.encode(
                    [msgspec.Raw(_rewritten(bytes(value), items)) for value in _arrays.decode(raw)]
                )
            return msgspec.json.encode(_integers(msgspec.json.decode(raw)))  # many ids: one pass for all
        case _ if _is_integer(kinds):
            return msgspec.json.encode(_integers(msgspec.json.decode(raw)))
    return raw


def _integers(value: Any) -> Any:
    """The value with integers instead of integral floats, also in arrays."""
    if isinstance(value, list):
        return [_integers(item) if isinstance(item, float | list) else item for item in value]
    is_integral = isinstance(value, float) and value.is_integer() and abs(value) < MAX_EXACT
    return int(value) if is_integral else value


def _is_integer(kinds: Kinds) -> bool:
    has_float = any(isinstance(kind, types.FloatType) for kind in kinds)
    return not has_float and any(isinstance(kind, types.IntType) for kind in kinds)


@functools.cache
def _kinds_of(kind: Any) -> Kinds:
    """Of a struct. Looking at its whole tree takes milliseconds."""
    return _alternatives(types.type_info(kind))


@functools.cache
def _fields_of(cls: type) -> dict[str, Kinds]:
    """The fields of a struct that contain integers."""
    found = {field.encode_name: _alternatives(field.type) for field in _struct(cls).fields}
    return {name: kinds for name, kinds in found.items() if _have_integers(kinds)}


def _struct(cls: type) -> types.StructType:
    info = types.type_info(cls)
    assert isinstance(info, types.StructType)
    return info


def _fields(kinds: Kinds) -> dict[str, Kinds]:
    """The same, of an object that may be one of several structs."""
    fields: dict[str, Kinds] = {}
    for kind in kinds:
        if isinstance(kind, types.StructType):
            for name, alternatives in _fields_of(kind.cls).items():
                fields[name] = fields.get(name, ()) + alternatives
    return fields


def _have_integers(kinds: Kinds) -> bool:
    return _is_integer(kinds) or bool(_fields(kinds)) or any(_have_integers(_items((kind,))) for kind in _lists(kinds))


def _lists(kinds: Kinds) -> list[types.ListType]:
    return [kind for kind in kinds if isinstance(kind, types.ListType)]


def _items(kinds: Kinds) -> Kinds:
    return tuple(item for kind in _lists(kinds) for item in _alternatives(kind.item_type))


def _alternatives(kind: types.Type) -> Kinds:
    if isinstance(kind, types.Metadata):
        return _alternatives(kind.type)
    if isinstance(kind, types.UnionType):
        return tuple(one for each in kind.types for one in _alternatives(each))
    return (kind,)
