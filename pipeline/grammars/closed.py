"""Close objects in schemas: no properties besides the named ones. For tool arguments and OpenAI's response_format.

JSON Schema allows any further properties, and people and schema libraries seldom forbid them. A small model that may
invent properties keeps inventing them.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Raw

TANGLED = frozenset(
    {"allOf", "oneOf", "not", "if", "then", "else", "minProperties", "patternProperties", "propertyNames"}
    | {"dependentSchemas", "dependentRequired", "dependencies", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"}
)
"""Keywords that relate an object's schema to other schemas. Closing such an object might contradict another schema, or
change which of several schemas matches."""

ALTERNATIVES = ("anyOf", "$ref")
"""Keywords that allow closing only if the same schema has no properties of its own."""

OF_OBJECTS = ("properties", "required", "additionalProperties")
NAMED = ("properties", "$defs", "definitions")
"""Keywords that hold schemas by names."""

LISTED = ("anyOf", "prefixItems")
SINGLE = ("items", "additionalProperties")


def closed(source: str, schema: Any) -> str:
    """A schema's text with closed objects, unless they define further properties. All matches also match the original
    schema. If any object can't be closed safely, the schema is returned unchanged. All other text is unchanged, so
    that numbers keep every digit."""
    return _closed(source.strip()) if _is_plain(schema) else source


def _is_plain(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return True
    if not TANGLED.isdisjoint(schema):
        return False
    if any(key in schema for key in ALTERNATIVES) and any(key in schema for key in OF_OBJECTS):
        return False
    named, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(named, dict) or not isinstance(required, list) or not all(name in named for name in required):
        return False
    return all(_is_plain(part) for part in _parts(schema))


def _parts(schema: Mapping[str, Any]) -> Iterable[Any]:
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            yield from value.values()
        elif key in LISTED and isinstance(value, list):
            yield from value
        elif key in SINGLE:
            yield value


def _closed(text: str) -> str:
    if not text.startswith("{"):
        return text
    members = members_of(text)
    for key, value in members.items():
        if key in NAMED and value.startswith("{"):
            members[key] = object_of({name: _closed(part) for name, part in members_of(value).items()})
        elif key in LISTED and value.startswith("["):
            parts = msgspec.json.decode(value, type=list[Raw])
            members[key] = f"[{', '.join(_closed(bytes(part).decode()) for part in parts)}]"
        elif key in SINGLE:
            members[key] = _closed(value)
    if "properties" in members:
        members.setdefault("additionalProperties", "false")
    return object_of(members)


def members_of(text: str) -> dict[str, str]:
    """The unparsed members of an object's JSON text. Raises msgspec.DecodeError."""
    return {name: bytes(part).decode() for name, part in msgspec.json.decode(text, type=dict[str, Raw]).items()}


def object_of(members: Mapping[str, str]) -> str:
    """The JSON text of an object with these unparsed members."""
    return "{" + ", ".join(f"{json.dumps(name)}: {part}" for name, part in members.items()) + "}"
