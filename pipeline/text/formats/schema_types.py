"""The JSON types that a schema allows, and texts converted to them. For formats that write a value without quotes, so
that only the schema tells the text "5" from the number 5."""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec

MAX_REFS = 16
"""How many references are followed from a property to its type."""

STRING_ONLY = frozenset({"string"})
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}

Types = frozenset[str] | None
"""Names of JSON types, with `integer` apart from `number`; None if any is allowed."""


@lru_cache(maxsize=256)
def property_types(schema: str) -> Mapping[str, Types]:
    """The types of each property of an object's schema, given as text. Properties without a type are missing."""
    try:
        root = msgspec.json.decode(schema) if schema else {}
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return {}
    properties = root.get("properties") if isinstance(root, dict) else None
    if not isinstance(properties, dict):
        return {}
    return {name: types for name, part in properties.items() if (types := types_of(part, root)) is not None}


def types_of(schema: Any, root: Mapping[str, Any], num_refs: int = 0) -> Types:
    """The types that a part of the schema `root` allows."""
    if not isinstance(schema, dict) or num_refs > MAX_REFS:
        return None
    match schema:
        case {"type": str(name)}:
            return frozenset({name})
        case {"type": [*names]} if names and all(isinstance(name, str) for name in names):
            return frozenset(names)
        case {"const": value}:
            return frozenset({_type_of(value)})
        case {"enum": [*values]} if values:
            return frozenset(map(_type_of, values))
        case {"$ref": str(ref)}:
            return types_of(resolved(ref, root), root, num_refs + 1)
    for key in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(key), list) and parts:
            each = [types_of(part, root, num_refs + 1) for part in parts]
            known = [types for types in each if types is not None]
            return frozenset().union(*known) if len(known) == len(each) else None
    return None


def resolved(ref: str, root: Mapping[str, Any]) -> Any:
    """The part of `root` that a local reference such as `#/$defs/point` names; None if there is none."""
    kind, _, name = ref.removeprefix("#/").partition("/")
    parts = root.get(kind) if ref.startswith("#/") and kind in ("$defs", "definitions") else None
    return parts.get(name) if isinstance(parts, dict) else None


def as_json(text: str, types: Types) -> str:
    """The JSON of a value written without quotes. If no type fits, it is a string."""
    if types == STRING_ONLY:
        return quoted(text)
    bare = PYTHON_WORDS.get(text.strip(), text.strip())
    try:
        value = msgspec.json.decode(bare)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return quoted(text)
    kind = _type_of(value)
    if types is None or kind in types or (kind == "integer" and "number" in types):
        return bare
    return bare if kind == "number" and "integer" in types and float(value).is_integer() else quoted(text)


def quoted(text: str) -> str:
    """A JSON string."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """The inside of a JSON string."""
    return quoted(text)[1:-1]


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"
