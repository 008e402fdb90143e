"""The keyword `format` of a schema: the names that llguidance does not have.

By JSON Schema a format is an annotation, and libraries write names of their own: pydantic `uuid4`, `password`,
`binary`, `path`. llguidance refuses them. So those that are a form of one that it has become that one, and others are
taken out of what it sees.
"""

from typing import Any

import msgspec
from msgspec import Raw

from pipeline.grammars.closed import members_of, object_of
from pipeline.grammars.keywords import OF_NAMES, OF_VALUES

KNOWN = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
"""The library's."""

LIKE = {f"uuid{version}": "uuid" for version in range(1, 9)}
"""Names of which each value has the other's form."""


def with_known_formats(source: str, schema: Any) -> str:
    """A schema's text without the formats that the library does not have. What is written stays else as it is written:
    every digit of a number counts. Raises msgspec.DecodeError."""
    return _edited(source.strip()) if _has_unknown(schema) else source


def _has_unknown(schema: Any) -> bool:
    if isinstance(schema, list):
        return any(map(_has_unknown, schema))
    if not isinstance(schema, dict):
        return False
    return any(
        any(map(_has_unknown, value.values()))
        if key in OF_NAMES and isinstance(value, dict)
        else _is_unknown(key, value) or (key not in OF_VALUES and _has_unknown(value))
        for key, value in schema.items()
    )


def _is_unknown(key: str, value: Any) -> bool:
    return key == "format" and isinstance(value, str) and value not in KNOWN


def _edited(text: str) -> str:
    if text.startswith("["):
        parts = msgspec.json.decode(text, type=list[Raw])
        return f"[{', '.join(_edited(bytes(part).decode()) for part in parts)}]"
    if not text.startswith("{"):
        return text
    members = members_of(text)
    for key, value in list(members.items()):
        if key in OF_NAMES and value.startswith("{"):
            members[key] = object_of({name: _edited(part) for name, part in members_of(value).items()})
        elif key == "format" and value.startswith('"'):
            name = msgspec.json.decode(value, type=str)
            if name in LIKE:
                members[key] = f'"{LIKE[name]}"'
            elif name not in KNOWN:
                del members[key]
        elif key not in OF_VALUES:
            members[key] = _edited(value)
    return object_of(members)
