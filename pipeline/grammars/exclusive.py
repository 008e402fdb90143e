"""Write `oneOf` as `anyOf` where no value can match two of its schemas: there both mean the same.

llguidance decides that for schemas that it sees, but not behind `$ref`, which pydantic writes for each member of a
union of models. Two kinds of proof are known here: the schemas' types differ, or their objects require a property with
different values, such as `kind`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from pipeline.text.formats.grammar.schema_types import JSON_TYPES

MAX_REFS = 16
"""References in a row that are followed"""

MIN_LOOKS, LOOKS_PER_CHAR = 2**14, 2
"""A document's names and values may be looked at so often. One takes about a microsecond."""
CHARS_PER_LOOK = 8
"""Of a reference"""

Resolve = Callable[[str], Any]
"""A local reference → the schema that it names, None if there is none"""


class LookBudget:
    """How often the names and values of a document may still be looked at. Many references may lead to the same ones,
    so without a limit that takes quadratic time."""

    def __init__(self, num_chars: int) -> None:
        """`num_chars`: of the document."""
        self._left = MIN_LOOKS + LOOKS_PER_CHAR * num_chars

    def take(self, num: int) -> bool:
        """Whether so many are left."""
        self._left -= num
        return self._left >= 0

    def take_ref(self, ref: str) -> bool:
        """Whether enough are left to follow a reference."""
        return self.take(1 + len(ref) // CHARS_PER_LOOK)


def with_any_of(schema: dict[str, Any], resolve: Resolve, looks: LookBudget) -> dict[str, Any]:
    """The schema with `anyOf` in place of `oneOf`, if that is proven to mean the same with the `looks` that are
    left."""
    parts = schema.get("oneOf")
    if "anyOf" in schema or not isinstance(parts, list) or not parts or not _are_exclusive(parts, resolve, looks):
        return schema
    return {"anyOf" if key == "oneOf" else key: value for key, value in schema.items()}


def _are_exclusive(parts: Sequence[Any], resolve: Resolve, looks: LookBudget) -> bool:
    objects: list[Mapping[str, Any]] = []
    seen: set[str] = set()
    for part in parts:
        target = _target(part, resolve, looks)
        if not isinstance(target, dict) or not looks.take(_len(target.get("type")) + _len(target.get("required"))):
            return False
        types = _types(target)
        if not types or not types.isdisjoint(seen):
            return False
        seen |= types - {"object"}
        if "object" in types:
            objects.append(target)
    if len(objects) < 2:
        return True
    required = [_required(schema) for schema in objects]
    return any(_differ(name, objects, required, looks) for name in required[0])


def _target(part: Any, resolve: Resolve, looks: LookBudget) -> Any:
    """The schema that references lead to. What stands beside a reference only restricts more."""
    for _ in range(MAX_REFS):
        if not isinstance(part, dict) or not isinstance(part.get("$ref"), str):
            return part
        if not looks.take_ref(part["$ref"]):
            return None
        part = resolve(part["$ref"])
    return None


def _len(value: Any) -> int:
    return len(value) if isinstance(value, list) else 1


def _types(schema: Mapping[str, Any]) -> set[str]:
    """The types of the values that may match; empty if they are not known."""
    given = schema.get("type")
    names = given if isinstance(given, list) else [given]
    known = {name for name in names if isinstance(name, str) and name in JSON_TYPES}
    if len(known) < len(names):
        return set()
    return {"number" if name == "integer" else name for name in known}


def _required(schema: Mapping[str, Any]) -> Collection[str]:
    names = schema.get("required")
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else ()


def _differ(
    name: str, objects: Sequence[Mapping[str, Any]], required: Sequence[Collection[str]], looks: LookBudget
) -> bool:
    """Whether each of the objects requires a property with values that no other allows."""
    seen: set[Any] = set()
    for schema, names in zip(objects, required, strict=True):
        properties = schema.get("properties")
        values = _values(properties.get(name), looks) if isinstance(properties, dict) and name in names else None
        if not values or not values.isdisjoint(seen):
            return False
        seen |= values
    return True


def _values(schema: Any, looks: LookBudget) -> set[Any] | None:
    """The values that a schema lists; None if it lists none, or numbers, which can be written in several ways."""
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not looks.take(_len(values)):
        return None
    if not isinstance(values, list) or not all(value is None or isinstance(value, str | bool) for value in values):
        return None
    return set(values)
