"""The schema keyword `format`: replace or remove names that llguidance does not support.

In JSON Schema a format is an annotation, and libraries write names of their own, such as pydantic's `uuid4`,
`password`, `binary` and `path`. llguidance refuses them. So a special form of a supported format becomes that format,
and other names are removed.
"""

from typing import Any

import msgspec
from msgspec import Raw

from pipeline.grammars.closed import members_of, object_of
from pipeline.grammars.keywords import OF_NAMES, OF_VALUES

KNOWN = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
"""The library's formats."""

LIKE = {f"uuid{version}": "uuid" for version in range(1, 9)}
"""Names → the more general format that includes all their values."""


def with_known_formats(source: str, schema: Any) -> str:
    """A schema's text without formats that the library does not support. All other text is unchanged, so that numbers
    keep every digit. Raises msgspec.DecodeError."""
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
