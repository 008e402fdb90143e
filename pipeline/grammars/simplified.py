"""Rewrite schemas that people and schema libraries write into ones that mean the same and that llguidance enforces.

The library refuses keywords that it does not know, even where they restrict nothing: zod writes `propertyNames:
{"type": "string"}` for each record, pydantic writes the names of a dict as `propertyNames: {"enum": […]}`. Keywords
that restrict nothing are removed here. Those that other keywords can express are replaced. All others stay, and the
library refuses them by name.
"""

import re
from collections.abc import Iterator, Mapping, Set
from typing import Any, NamedTuple
from urllib.parse import quote

from pipeline.grammars.exact_json import Written, encoded
from pipeline.grammars.exclusive import LookBudget, with_any_of
from pipeline.grammars.keywords import KEYWORDS, OF_NAMES
from pipeline.grammars.numbers import check_values, with_enforced_bounds
from pipeline.grammars.schema import VALUES, UnsupportedSchema
from pipeline.text.formats.grammar.schema_types import resolved

COUNTS = frozenset(
    {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains"}
)
"""Keywords with a count, which may be written as 1.0"""

UNREACHED = 2**31
"""No output has as many characters, items or properties."""

MAX_REPEATED_CHARS = 2**20
"""A schema of all properties is repeated for each name, and a place for each reference to its `id`, in the whole
document up to this size together."""

NO_ASSERTION = frozenset({"$defs", "definitions", "$anchor", "$dynamicAnchor", "$recursiveAnchor"})
APPLICATORS = frozenset(
    {"$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "not", "if", "then", "else"}
    | {"dependentSchemas", "dependencies", "contains"}
)
"""Keywords whose schemas may evaluate properties or items of the same value"""

NAME_FORMATS = {
    "uuid": "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$",
    "date": "^[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12][0-9]|3[01])$",
}
"""Formats of property names → patterns"""

LOCAL = r"(?:[A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+-]"
SECONDS = r"\d+(?:[.,]\d+)?S"
DAYS = r"(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)"
TIMES = rf"T(?:\d+H(?:\d+M)?(?:{SECONDS})?|\d+M(?:{SECONDS})?|{SECONDS})"
EMOJI = r"[\p{Extended_Pictographic}\p{Emoji_Component}]*"
EQUAL_PATTERNS = {
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        rf"^P(?:\d+W|{DAYS}(?:{TIMES})?|{TIMES})$"
    ),
    r"^(?=[\s\S]*[\p{Extended_Pictographic}\p{Regional_Indicator}\u20E3])"
    r"[\p{Extended_Pictographic}\p{Emoji_Component}]+$": (
        rf"^{EMOJI}[\p{{Extended_Pictographic}}\p{{Regional_Indicator}}\u20E3]{EMOJI}$"
    ),
    r"^[A-Z]{2}(?!00|01|99)\d{2}[A-Z0-9]{11,30}$": r"^[A-Z]{2}(?:0[2-9]|[1-8]\d|9[0-8])[A-Z0-9]{11,30}$",
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        rf"^{LOCAL}@(?:[A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{{2,}}$"
    ),
}
"""Patterns of well-known libraries with look-around → the same without. These are zod's, of durations, emoji, bank
accounts and email addresses."""


NOT_IN_FRAGMENTS = re.compile(r"[^\w!#$%&'()*+,\-./:;=?@~]|%(?![0-9a-fA-F]{2})", re.ASCII)
"""Characters that a URI's fragment spells with %"""


def simplified(schema: Any) -> Any:
    """A decoded schema (`exact_json.decoded`) that accepts the same values, except that some bounds of numbers are
    tighter (`numbers`). Raises UnsupportedSchema if it has a number that can't be enforced."""
    made = _Simplifier(schema).schema(schema)
    return schema if made is False else made  # the library's reason names the keyword


class _Simplifier:
    def __init__(self, root: Any) -> None:
        self._root = root if isinstance(root, dict) else {}
        self._num_repeated = 0
        """Characters of the schemas that were repeated"""
        text = encoded(root)
        self._looks = LookBudget(len(text))
        self._has_dynamic_refs = '"$dynamicRef"' in text
        self._has_unevaluated = '"unevaluated' in text
        """A schema that restricts nothing may still evaluate items or properties."""
        self._has_recursive_refs = '"$recursiveRef"' in text
        self._has_inner_ids = text.count('"$id"') > ("$id" in self._root)
        """References may start at a part of the document."""
        self._old_ids = _old_ids(self._root) if '"id"' in text and '"$ref"' in text and '"$id"' not in text else {}

    def schema(self, schema: Any) -> Any:
        """A schema, or an array of schemas, simplified. Anything else is returned as it is."""
        if isinstance(schema, list):
            return [self.schema(part) for part in schema]
        if not isinstance(schema, dict):
            return None if isinstance(schema, float) and abs(schema) == float("inf") else schema
        if isinstance(ref := schema.get("$ref"), str) and ref in self._old_ids:
            return {"$ref": self._path_of(ref)}  # beside it, drafts 3 and 4 ignore all keywords
        schema = with_required_names(schema)
        made = {key: self._keyword(key, value) for key, value in schema.items() if key not in VALUES}
        made = with_enforced_bounds(_counted(made))
        made = self._without_anchors(made)
        if not self._has_unevaluated:
            made = _without_contains(_without_conditions(made))
        made = _without_not(_without_unevaluated(_without_dependencies(made)))
        made = with_any_of(made, self._named, self._looks)
        if "propertyNames" in made:
            made = self._without_property_names(made)
        return False if "not" in made and restricts_nothing(made["not"]) else made

    def _path_of(self, ref: str) -> str:
        """What a reference to an `id` becomes. If they make the document too long, it stays, and the library refuses it
        by name."""
        if self._num_repeated > MAX_REPEATED_CHARS:
            return ref
        path = "".join(reversed([f"/{step}" for step in _steps(self._old_ids[ref])]))
        self._num_repeated += len(path)
        return _escaped(f"#{path}")

    def _named(self, ref: str) -> Any:
        return None if self._has_inner_ids else resolved(ref, self._root)

    def _keyword(self, key: str, value: Any) -> Any:
        if key in ("enum", "const"):
            check_values(key, value)
            return value
        if key in OF_NAMES and isinstance(value, dict):
            return {name: self.schema(part) for name, part in value.items()}
        if key == "$ref" and isinstance(value, str):
            return _escaped(value)
        if key == "pattern":
            return EQUAL_PATTERNS.get(value, value) if isinstance(value, str) else value
        if key in KEYWORDS and isinstance(value, Written):
            return value  # a bound or a count
        return self.schema(value)

    def _without_anchors(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Without references that depend on the path to them, dynamic anchors are plain ones."""
        if not self._has_recursive_refs:
            schema.pop("$recursiveAnchor", None)
        if not self._has_dynamic_refs and isinstance(schema.get("$dynamicAnchor"), str) and "$anchor" not in schema:
            schema["$anchor"] = schema.pop("$dynamicAnchor")
        return schema

    def _without_property_names(self, schema: dict[str, Any]) -> dict[str, Any]:
        names = schema["propertyNames"]
        if isinstance(names, dict) and KEYWORDS & names.keys() == {"$ref"} and isinstance(names["$ref"], str):
            if not self._looks.take_ref(names["$ref"]):
                return schema
            names = resolved(names["$ref"], self._root)  # only this level: definitions may refer to each other
            if isinstance(names, dict):
                values, types = names.get("enum"), names.get("type")
                if not self._looks.take(len(names) + sum(len(one) for one in (values, types) if isinstance(one, list))):
                    return schema
                names = _counted(names)
        rest = {key: value for key, value in schema.items() if key != "propertyNames"}
        if restricts_nothing(names):
            return rest
        if not isinstance(names, dict):
            return schema
        types, keywords = names.get("type", "string"), KEYWORDS & names.keys() - {"type"} - NO_ASSERTION
        if types != "string" and not (isinstance(types, list) and "string" in types):
            return schema
        if not keywords:
            return rest
        if "patternProperties" in schema or "unevaluatedProperties" in schema:
            return schema
        if self._num_repeated > MAX_REPEATED_CHARS:
            return schema
        others = schema.get("additionalProperties", True)
        named = schema.get("properties", {})
        if keywords in ({"enum"}, {"const"}) and isinstance(named, dict):
            values = names["enum"] if "enum" in names else [names["const"]]
            allowed = [one for one in values if isinstance(one, str)] if isinstance(values, list) else []
            if allowed and named.keys() <= set(allowed) and self._may_repeat(others, allowed):
                each = {name: named.get(name, others) for name in allowed}
                return rest | {"properties": each, "additionalProperties": False}
        elif not named and (pattern := _pattern_of_names(names, keywords)):
            return rest | {"patternProperties": {pattern: others}, "additionalProperties": False}
        return schema

    def _may_repeat(self, schema: Any, names: list[str]) -> bool:
        if self._num_repeated <= MAX_REPEATED_CHARS:
            self._num_repeated += sum(map(len, names)) + len(names) * (len(encoded(schema)) + 4)
        return self._num_repeated <= MAX_REPEATED_CHARS


def with_required_names(schema: dict[str, Any]) -> dict[str, Any]:
    """`required: true` in properties, which draft 3 has and Jackson writes, as `required` with their names."""
    named, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(named, dict) or not isinstance(required, list):
        return schema
    flags = {
        name: part["required"]
        for name, part in named.items()
        if isinstance(part, dict) and isinstance(part.get("required"), bool)
    }
    if not flags:
        return schema
    others = {name: _without(part, "required") if name in flags else part for name, part in named.items()}
    known = {name for name in required if isinstance(name, str)}
    return schema | {
        "properties": others,
        "required": [*required, *(name for name, flag in flags.items() if flag and name not in known)],
    }


class _Path(NamedTuple):
    """Where a value is in the document. Texts of all paths would be as long as its longest name times their number."""

    step: str
    behind: "_Path | None"


def _steps(path: _Path | None) -> Iterator[str]:
    """The steps of a JSON pointer, the last one first."""
    while path is not None:
        yield path.step.replace("~", "~0").replace("/", "~1")
        path = path.behind


def _old_ids(root: dict[str, Any]) -> dict[str, _Path | None]:
    """Places of the schemas with an `id`, the name of drafts 3 and 4 for `$id`; the root's is None. Jackson refers so
    to classes that the schema has shown once, as `urn:jsonschema:com:acme:Node`."""
    found: dict[str, _Path | None] = {}
    left: list[tuple[Any, _Path | None, bool]] = [(root, None, False)]
    while left:
        part, path, has_names = left.pop()
        if isinstance(part, list):
            left += [(one, _Path(str(number), path), False) for number, one in enumerate(part)]
        if not isinstance(part, dict):
            continue
        if not has_names and isinstance(one := part.get("id"), str) and not one.startswith("#"):
            found.setdefault(one, path)
        for key, value in part.items():
            if isinstance(value, dict | list) and (has_names or key not in VALUES):
                left.append((value, _Path(key, path), not has_names and key in OF_NAMES))
    return found


def _escaped(ref: str) -> str:
    """A reference to a part of the document as a URI: names of types may have characters that it can't, as in
    `Record<string,number>` and `Größe`, and some libraries write them as they are."""
    return NOT_IN_FRAGMENTS.sub(lambda found: quote(found[0], safe=""), ref) if ref.startswith("#") else ref


def restricts_nothing(schema: Any) -> bool:
    """Whether each value matches a simplified schema."""
    return schema is True or (isinstance(schema, dict) and not KEYWORDS & schema.keys() - NO_ASSERTION)


def _counted(schema: dict[str, Any]) -> dict[str, Any]:
    """Counts as integers, without maxima that no output reaches. Raises UnsupportedSchema."""
    made = {}
    for key, value in schema.items():
        if key in COUNTS and isinstance(value, int | float) and not isinstance(value, bool):
            if value < 0 or (value < UNREACHED and value != int(value)):
                shown = value.text if isinstance(value, Written) else value
                raise UnsupportedSchema(f'its keyword "{key}" must be a whole number that is not negative, not {shown}')
            if value >= UNREACHED:
                if key.startswith("max"):
                    continue
                raise UnsupportedSchema(f'its keyword "{key}" is larger than any output can be')
            value = int(value)
        made[key] = value
    return made


def _without(schema: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key not in keys}


def _without_conditions(schema: dict[str, Any]) -> dict[str, Any]:
    if "if" not in schema or all(restricts_nothing(schema.get(key, True)) for key in ("then", "else")):
        return _without(schema, "if", "then", "else")
    return schema


def _without_contains(schema: dict[str, Any]) -> dict[str, Any]:
    if "contains" not in schema or (schema.get("minContains", 1) == 0 and "maxContains" not in schema):
        return _without(schema, "contains", "minContains", "maxContains")
    return schema


def _without_dependencies(schema: dict[str, Any]) -> dict[str, Any]:
    for key in ("dependentRequired", "dependentSchemas", "dependencies"):
        value = schema.get(key)
        if isinstance(value, dict) and all(part == [] or restricts_nothing(part) for part in value.values()):
            schema = _without(schema, key)
    return schema


def _without_unevaluated(schema: dict[str, Any]) -> dict[str, Any]:
    """Also without `uniqueItems` of arrays that can't have equal items."""
    most = schema.get("maxItems")
    if schema.get("uniqueItems") is False or ("uniqueItems" in schema and isinstance(most, int) and most <= 1):
        schema = _without(schema, "uniqueItems")
    for key, others in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        if key not in schema:
            continue
        if restricts_nothing(schema[key]) or (others in schema and not isinstance(schema[others], list)):
            schema = _without(schema, key)
        elif APPLICATORS.isdisjoint(schema) and others not in schema:
            schema = _without(schema, key) | {others: schema[key]}
    return schema


def _without_not(schema: dict[str, Any]) -> dict[str, Any]:
    return _without(schema, "not") if schema.get("not", True) is False else schema


def _pattern_of_names(names: Mapping[str, Any], keywords: Set[str]) -> str | None:
    """A pattern of names that match a schema with these keywords; None if they need more than one."""
    if keywords == {"pattern"}:
        return names["pattern"] if isinstance(names["pattern"], str) else None
    if keywords == {"format"}:
        return NAME_FORMATS.get(names["format"]) if isinstance(names["format"], str) else None
    if keywords <= {"minLength", "maxLength"}:
        return f"^(?s:.{{{names.get('minLength', 0)},{names.get('maxLength', '')}}})$"
    return None
