"""Objects without the properties that their schema does not name: arguments of calls, and OpenAI's response_format.

JSON Schema lets an object have any properties besides those that are named, and people, and the libraries that write
schemas for them, seldom say that there are no others. A small model that may invent properties goes on inventing them.
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
"""Keywords beside which an object can't be judged by itself: what closes it may contradict another schema for the same
object, or make a choice between schemas come out otherwise."""

ALTERNATIVES = ("anyOf", "$ref")
"""These leave it so, where they stand without properties of their own."""

OF_OBJECTS = ("properties", "required", "additionalProperties")
NAMED = ("properties", "$defs", "definitions")
"""Keywords that hold schemas by names."""

LISTED = ("anyOf", "prefixItems")
SINGLE = ("items", "additionalProperties")


def closed(source: str, schema: Any) -> str:
    """A schema's text, whose objects have the properties that they name and no others, unless it says something of
    others. What matches it matches the schema as it was. Where an object can't be judged by itself, it is left as it
    is, all of it. What is written stays as it is written: every digit of a number counts."""
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
    """The parts of an object's text, as they are written. Raises msgspec.DecodeError."""
    return {name: bytes(part).decode() for name, part in msgspec.json.decode(text, type=dict[str, Raw]).items()}


def object_of(members: Mapping[str, str]) -> str:
    """The text of an object of such parts."""
    return "{" + ", ".join(f"{json.dumps(name)}: {part}" for name, part in members.items()) + "}"
