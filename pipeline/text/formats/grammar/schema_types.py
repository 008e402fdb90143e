"""The JSON types that a schema allows, and texts converted to them. For formats that write a value without quotes, so
that only the schema tells the text "5" from the number 5."""

import json
import math
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from typing import Any
from urllib.parse import unquote

import msgspec
from msgspec import Raw

DEFINITIONS = ("$defs", "definitions")
"""The keywords of a schema that references lead to"""

JSON_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
OTHER = "other"
"""Stands for all names that are no types of JSON."""

_BITS = {name: 1 << index for index, name in enumerate((*sorted(JSON_TYPES), OTHER))}
_TYPE_BITS = _BITS | {"number": _BITS["number"] | _BITS["integer"]}
_ANY = (1 << len(_BITS)) - 1

_TYPES_BY_START = {'"': "string", "[": "array", "{": "object", "t": "boolean", "f": "boolean", "n": "null"}
"""By the first character of a value's JSON; others begin a number."""
_FRACTION = frozenset(".eE")

ALTERNATIVES = ("anyOf", "oneOf")
_LEADING = frozenset({"$ref", "allOf", *ALTERNATIVES})
"""The keywords that lead to other schemas that a value must match"""
STRING_ONLY = frozenset({"string"})
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}

MAX_KEPT_CHARS = 16_384

Types = frozenset[str] | None
"""Names of JSON types, with `integer` apart from `number`; None if any is allowed."""


def property_types(schema: str) -> Mapping[str, Types]:
    """The types of each property of an object's schema, given as text. Those of a long schema are not kept: it would
    stay in memory."""
    return _kept_types(schema) if len(schema) <= MAX_KEPT_CHARS else _types_of_properties(schema)


def _types_of_properties(schema: str) -> Mapping[str, Types]:
    try:
        root = msgspec.json.decode(schema) if schema else {}
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return {}
    table = TypeTable(root)
    parts = _property_schemas(root)
    return {name: table.types_of(part) for name, part in parts.items()}


def _property_schemas(root: Any) -> Mapping[str, Any]:
    """A schema for each property that `root` names, itself or behind references, `allOf`, `anyOf` and `oneOf`. Of
    alternatives, those count that name the property: a model that writes it means one of
    them."""
    always: dict[str, list[Any]] = {}
    sometimes: dict[str, list[Any]] = {}
    seen: set[int] = set()
    todo: list[Any] = [root]
    alternatives: list[Any] = []
    for found, parts in ((always, todo), (sometimes, alternatives)):
        while parts:
            part = parts.pop()
            if not isinstance(part, dict) or id(part) in seen:
                continue
            seen.add(id(part))
            properties = part.get("properties")
            for name, one in properties.items() if isinstance(properties, dict) else ():
                found.setdefault(name, []).append(one)
            for keyword in ("allOf", *ALTERNATIVES):
                if isinstance(members := part.get(keyword), list):
                    (parts if keyword == "allOf" else alternatives).extend(members)
            if isinstance(ref := part.get("$ref"), str):
                parts.append(resolved(ref, root))
    return {
        name: parts[0] if len(parts) == 1 else {"allOf": parts}
        for name in dict.fromkeys((*always, *sometimes))
        if (parts := [*always.get(name, ()), *([{"anyOf": sometimes[name]}] if name in sometimes else [])])
    }


_kept_types = lru_cache(maxsize=256)(_types_of_properties)


class _Node(msgspec.Struct):
    """What a schema, or one of its keywords, allows, as far as it is known. It allows a type as soon as `need` of the
    nodes that lead to it do: all of them for a schema, one for `anyOf`."""

    part: Any
    """The schema: kept, so that its id stays its own"""
    need: int = 1
    allowed: int = 0
    """Bits of `_BITS`"""
    counts: list[int] = []
    """For each bit, how many of the nodes that lead to this one allow it, if it needs more than one"""
    users: list["_Node"] = []
    """The nodes that this one leads to"""


class TypeTable:
    """The types that parts of the schema `root` allow. Each part is looked at once, however many references lead to it:
    types flow along the references until nothing changes, and each part changes only as often as there are types."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._nodes: dict[int, _Node] = {}
        """By the schema's id"""
        self._new: list[_Node] = []

    def types_of(self, part: Any) -> Types:
        """The types that a part of the schema allows."""
        if isinstance(part, dict) and _LEADING.isdisjoint(part):
            return _names(_own_types(part))
        node = self._node(part)
        while self._new:
            self._expand(self._new.pop())
        return _names(node.allowed)

    def _node(self, part: Any) -> _Node:
        node = self._nodes.get(id(part))
        if node is None:
            node = self._nodes[id(part)] = _Node(part)
            self._new.append(node)
        return node

    def _expand(self, node: _Node) -> None:
        """Let what the schema's keywords allow flow to it."""
        part = node.part
        if not isinstance(part, dict):
            self._add(node, 0 if part is False else _ANY)
            return
        if _LEADING.isdisjoint(part):
            self._add(node, _own_types(part))
            return
        groups: list[list[_Node]] = []
        if isinstance(ref := part.get("$ref"), str) and (target := resolved(ref, self._root)) is not None:
            groups.append([self._node(target)])
        if isinstance(members := part.get("allOf"), list):
            groups += [[self._node(one)] for one in members]
        for keyword in ALTERNATIVES:
            if isinstance(members := part.get(keyword), list) and members:
                groups.append([self._node(one) for one in members])
        own = _own_types(part)
        if own == _ANY and len(groups) == 1:  # all that it allows comes from one keyword
            for one in groups[0]:
                self._lead(one, node)
            return
        node.need = len(groups) + 1
        self._add(node, own)
        for group in groups:
            user = node if len(group) == 1 else _Node(None)
            for one in group:
                self._lead(one, user)
            if user is not node:
                self._lead(user, node)

    def _lead(self, node: _Node, user: _Node) -> None:
        node.users.append(user)
        self._add(user, node.allowed)

    def _add(self, node: _Node, allowed: int) -> None:
        """One of the nodes that lead to a node allows types that it did not allow before."""
        todo = [(node, allowed)]
        while todo:
            node, allowed = todo.pop()
            gained = allowed & ~node.allowed
            if node.need > 1:
                node.counts = node.counts or [0] * len(_BITS)
                for index, bit in enumerate(_BITS.values()):
                    if allowed & bit:
                        node.counts[index] += 1
                        gained &= ~bit if node.counts[index] < node.need else _ANY
            if gained:
                node.allowed |= gained
                todo += [(user, gained) for user in node.users]


def types_of(schema: Any, root: Mapping[str, Any]) -> Types:
    """The types that a part of the schema `root` allows. For many parts of one schema, use one `TypeTable`."""
    return TypeTable(root).types_of(schema)


def _own_types(schema: Mapping[str, Any]) -> int:
    """The types that a schema allows by its own type and values, as bits."""
    types = _ANY
    match schema:
        case {"type": str(name)}:
            types = _bits((name,))
        case {"type": [*names]} if names and all(isinstance(name, str) for name in names):
            types = _bits(names)
    match schema:
        case {"const": value}:
            values = _bits((_type_of(value),))
        case {"enum": [*some]} if some:
            values = _bits(map(_type_of, some))
        case _:
            values = _ANY
    return types & values or types  # they contradict each other if the type's name is wrong


@cache
def _names(bits: int) -> Types:
    """The types of a schema; any, if it contradicts itself."""
    return None if bits in (0, _ANY) else frozenset(name for name, bit in _BITS.items() if bits & bit)


def _bits(names: Iterable[str]) -> int:
    bits = 0
    for name in names:
        bits |= _TYPE_BITS.get(name, _BITS[OTHER])
    return bits


def resolved(ref: str, root: Any) -> Any:
    """The part of `root` that a local reference such as `#/$defs/point` names; None if there is none."""
    if ref == "#":
        return root
    if not ref.startswith("#/"):
        return None
    part = root
    for step in ref[2:].split("/"):
        match part:
            case dict():
                name = step.replace("~1", "/").replace("~0", "~")
                part = part[name] if name in part else part.get(unquote(name))
            case list() if step.isascii() and step.isdecimal() and len(step) < 10 and int(step) < len(part):
                part = part[int(step)]
            case _:
                return None
    return part


def as_json(text: str, types: Types) -> str:
    """The JSON of a value written without quotes. If no type fits, it is a string."""
    if types == STRING_ONLY:
        return quoted(text)
    bare = PYTHON_WORDS.get(text.strip(), text.strip())
    try:
        msgspec.json.decode(bare, type=Raw)  # only its syntax: a number may be larger than any float
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return quoted(text)
    kind = _TYPES_BY_START.get(bare[0]) or ("integer" if _FRACTION.isdisjoint(bare) else "number")
    if types is None or kind in types or (kind == "integer" and "number" in types):
        return bare
    return bare if kind == "number" and "integer" in types and _is_whole(float(bare)) else quoted(text)


def _is_whole(value: float) -> bool:
    """Whether a number has no fraction. One that is too large for a float has none."""
    return math.isinf(value) or value.is_integer()


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
