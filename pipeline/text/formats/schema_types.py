"""The JSON types that a schema allows, and texts converted to them. For formats that write a value without quotes, so
that only the schema tells the text "5" from the number 5."""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec

DEFINITIONS = ("$defs", "definitions")
"""The keywords of a schema that references lead to"""

JSON_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
OTHER = "other"
"""Stands for all names that are no types of JSON."""

STRING_ONLY = frozenset({"string"})
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}

MAX_KEPT_CHARS = 16_384

Types = frozenset[str] | None
"""Names of JSON types, with `integer` apart from `number`; None if any is allowed."""


def property_types(schema: str) -> Mapping[str, Types]:
    """The types of each property of an object's schema, given as text. Properties without a type are missing. Those of
    a long schema are not kept: it would stay in memory."""
    return _kept_types(schema) if len(schema) <= MAX_KEPT_CHARS else _types_of_properties(schema)


def _types_of_properties(schema: str) -> Mapping[str, Types]:
    try:
        root = msgspec.json.decode(schema) if schema else {}
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return {}
    properties = root.get("properties") if isinstance(root, dict) else None
    if not isinstance(properties, dict):
        return {}
    table = TypeTable(root)
    return {name: types for name, part in properties.items() if (types := table.types_of(part)) is not None}


_kept_types = lru_cache(maxsize=256)(_types_of_properties)


class _Named(msgspec.Struct):
    """What a definition allows, as far as it is known."""

    types: set[str]
    is_known: bool
    """False: it allows any type, or more than its keywords tell."""
    users: list[str] = []
    """The references of the definitions that allow what this one allows"""


class TypeTable:
    """The types that parts of the schema `root` allow. Definitions are looked at once, however many references lead to
    them: types flow along the references until nothing changes, and each definition changes only a few times."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._named: dict[str, _Named] | None = None

    def types_of(self, part: Any) -> Types:
        """The types that a part of the schema allows."""
        types, refs = _own_types(part)
        if types is None:
            return None
        if refs and self._named is None:
            self._named = self._all_named()
        for ref in refs:
            found = (self._named or {}).get(ref)
            if found is None or not found.is_known:
                return None
            types |= found.types
        return frozenset(types) or None

    def _all_named(self) -> dict[str, _Named]:
        named: dict[str, _Named] = {}
        needs: dict[str, list[str]] = {}
        for kind in DEFINITIONS:
            parts = self._root.get(kind)
            for name, part in parts.items() if isinstance(parts, dict) else ():
                ref = f"#/{kind}/{name}"
                types, needs[ref] = _own_types(part)
                named[ref] = _Named(types or set(), types is not None)
        for ref, refs in needs.items():
            for needed in refs:
                if needed in named:
                    named[needed].users.append(ref)
                else:
                    named[ref].is_known = False
        changed = list(named)
        while changed:
            one = named[changed.pop()]
            for ref in one.users:
                user = named[ref]
                if user.is_known and not (one.is_known and one.types <= user.types):
                    user.is_known = one.is_known
                    user.types |= one.types
                    changed.append(ref)
        return named


def types_of(schema: Any, root: Mapping[str, Any]) -> Types:
    """The types that a part of the schema `root` allows. For many parts of one schema, use one `TypeTable`."""
    return TypeTable(root).types_of(schema)


def _own_types(schema: Any) -> tuple[set[str] | None, list[str]]:
    """The types that a part of a schema allows, besides those of its references, and these. None if any type is
    allowed."""
    types: set[str] = set()
    refs: list[str] = []
    parts = [schema]
    while parts:
        match parts.pop():
            case {"type": str(name)}:
                types.add(name if name in JSON_TYPES else OTHER)
            case {"type": [*names]} if names and all(isinstance(name, str) for name in names):
                types.update(name if name in JSON_TYPES else OTHER for name in names)
            case {"const": value}:
                types.add(_type_of(value))
            case {"enum": [*values]} if values:
                types.update(map(_type_of, values))
            case {"$ref": str(ref)}:
                refs.append(ref)
            case {"anyOf": [_, *_] as some} | {"oneOf": [_, *_] as some}:
                parts += some
            case _:
                return None, []
    return types, list(dict.fromkeys(refs))


def resolved(ref: str, root: Mapping[str, Any]) -> Any:
    """The part of `root` that a local reference such as `#/$defs/point` names; None if there is none."""
    kind, _, name = ref.removeprefix("#/").partition("/")
    parts = root.get(kind) if ref.startswith("#/") and kind in DEFINITIONS else None
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
