"""Where schemas are in a schema, and names in it that are almost keywords.

JSON Schema has names that it does not know mean nothing, so that anyone may add some: `nullable`, `x-order`. But
`maxlength` is nobody's addition.
"""

from collections.abc import Iterable, Mapping
from typing import Any

OF_NAMES = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords that hold schemas by names, which are the client's."""

OF_VALUES = frozenset({"const", "enum", "default", "examples"})
"""Keywords that hold values, and no schemas."""

OF_SCHEMAS = frozenset(
    {"allOf", "anyOf", "oneOf", "not", "if", "then", "else", "items", "prefixItems", "additionalItems", "contains"}
    | {"additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties"}
)
"""Keywords that hold a schema, or an array of them."""

KEYWORDS = (
    OF_NAMES
    | OF_SCHEMAS
    | {"type", "const", "enum", "format", "pattern", "required", "$ref", "$anchor", "$dynamicRef", "$dynamicAnchor"}
    | {"$recursiveRef", "$recursiveAnchor", "dependencies", "dependentRequired", "minContains", "maxContains"}
    | {"minLength", "maxLength", "minItems", "maxItems", "uniqueItems", "minProperties", "maxProperties"}
    | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)
"""All that say what a value is to be."""

_BY_LETTERS = {keyword.lower(): keyword for keyword in KEYWORDS}


def misspelt(schema: Any) -> tuple[str, str] | None:
    """The first name that is a keyword but for the case of its letters, and that keyword."""
    if isinstance(schema, list):
        return next((found for part in schema if (found := misspelt(part))), None)
    if not isinstance(schema, dict):
        return None
    for name in schema:
        if name not in KEYWORDS and (keyword := _BY_LETTERS.get(name.lower())):
            return name, keyword
    return next((found for part in _parts(schema) if (found := misspelt(part))), None)


def _parts(schema: Mapping[str, Any]) -> Iterable[Any]:
    for key, value in schema.items():
        if key in OF_NAMES and isinstance(value, dict):
            yield from value.values()
        elif key in OF_SCHEMAS:
            yield value
