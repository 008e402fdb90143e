"""Write `oneOf` as `anyOf` where no value can match two of its schemas: there both mean the same.

llguidance decides that for schemas that it sees, but not behind `$ref`, which pydantic writes for each member of a
union of models. Two kinds of proof are known here: the schemas' types differ, or their objects require a property with
different values, such as `kind`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from pipeline.text.formats.schema_types import JSON_TYPES

MAX_REFS = 16
"""References in a row that are followed"""

Resolve = Callable[[str], Any]
"""A local reference → the schema that it names, None if there is none"""


def with_any_of(schema: dict[str, Any], resolve: Resolve) -> dict[str, Any]:
    """The schema with `anyOf` in place of `oneOf`, if that is proven to mean the same."""
    parts = schema.get("oneOf")
    if "anyOf" in schema or not isinstance(parts, list) or not parts or not _are_exclusive(parts, resolve):
        return schema
    return {"anyOf" if key == "oneOf" else key: value for key, value in schema.items()}


def _are_exclusive(parts: Sequence[Any], resolve: Resolve) -> bool:
    """In time linear in the number of schemas and properties."""
    objects: list[Mapping[str, Any]] = []
    seen: set[str] = set()
    for part in parts:
        target = _target(part, resolve)
        types = _types(target)
        if not types or not types.isdisjoint(seen):
            return False
        seen |= types - {"object"}
        if "object" in types:
            objects.append(target)
    if len(objects) < 2:
        return True
    required = [_required(schema) for schema in objects]
    return any(_differ(name, objects, required) for name in required[0])


def _target(part: Any, resolve: Resolve) -> Any:
    """The schema that references lead to. What stands beside a reference only restricts more."""
    for _ in range(MAX_REFS):
        if not isinstance(part, dict) or not isinstance(part.get("$ref"), str):
            return part
        part = resolve(part["$ref"])
    return None


def _types(schema: Any) -> set[str]:
    """The types of the values that may match; empty if they are not known."""
    if not isinstance(schema, dict):
        return set()
    given = schema.get("type")
    names = given if isinstance(given, list) else [given]
    known = {name for name in names if isinstance(name, str) and name in JSON_TYPES}
    if len(known) < len(names):
        return set()
    return {"number" if name == "integer" else name for name in known}


def _required(schema: Mapping[str, Any]) -> Collection[str]:
    names = schema.get("required")
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else ()


def _differ(name: str, objects: Sequence[Mapping[str, Any]], required: Sequence[Collection[str]]) -> bool:
    """Whether each of the objects requires a property with values that no other allows."""
    seen: set[Any] = set()
    for schema, names in zip(objects, required, strict=True):
        properties = schema.get("properties")
        values = _values(properties.get(name)) if isinstance(properties, dict) and name in names else None
        if not values or not values.isdisjoint(seen):
            return False
        seen |= values
    return True


def _values(schema: Any) -> set[Any] | None:
    """The values that a schema lists; None if it lists none, or numbers, which can be written in several ways."""
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not all(value is None or isinstance(value, str | bool) for value in values):
        return None
    return set(values)
