"""Schema keywords by what they contain, and a check for misspelled keywords.

JSON Schema ignores unknown names, so anyone may add some, such as `nullable` or `x-order`. But `maxlength` is a typing
error.
"""

from collections.abc import Iterable, Mapping
from typing import Any

OF_NAMES = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords that hold an object of schemas, keyed by the client's names."""

OF_VALUES = frozenset({"const", "enum", "default", "examples"})
"""Keywords that hold plain values."""

OF_SCHEMAS = frozenset(
    {"allOf", "anyOf", "oneOf", "not", "if", "then", "else", "items", "prefixItems", "additionalItems", "contains"}
    | {"additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties"}
)
"""Keywords that hold a schema or an array of schemas."""

KEYWORDS = (
    OF_NAMES
    | OF_SCHEMAS
    | {"type", "const", "enum", "format", "pattern", "required", "$ref", "$anchor", "$dynamicRef", "$dynamicAnchor"}
    | {"$recursiveRef", "$recursiveAnchor", "dependencies", "dependentRequired", "minContains", "maxContains"}
    | {"minLength", "maxLength", "minItems", "maxItems", "uniqueItems", "minProperties", "maxProperties"}
    | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)
"""All keywords that constrain a value."""

_BY_LETTERS = {keyword.lower(): keyword for keyword in KEYWORDS}


def misspelt(schema: Any) -> tuple[str, str] | None:
    """The first name that differs from a keyword only in case, and that keyword."""
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
