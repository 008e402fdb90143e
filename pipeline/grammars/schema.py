"""Reject JSON schemas that llguidance accepts but does not enforce, and set its options.

The library refuses keywords that it does not know. Experiments found three cases in which it would accept an output
that does not validate:

- It takes a property name spelled with escapes for a different name. So our options allow one spelling of each
  character, without \\u.
- It then drops control characters, which can't be spelled, from `const`, names and patterns. Such schemas are refused.
- Names that the schema does not list may occur twice, but count as one property. So `minProperties` is limited.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from pipeline.grammars.keywords import misspelt

OWN_OPTIONS = "x-guidance"
"""The key of the library's options in a schema. A client must not set it: options can make the library ignore keywords
or write invalid JSON."""

STRICT = {"json_allowed_escapes": 'nrbtf\\"', "whitespace_pattern": r" |\n[ \t]{0,64}"}
"""Our options. White space is one blank, or a line break with indentation, because a small model that may write any
amount of it never stops."""

COMPACT = {"json_allowed_escapes": STRICT["json_allowed_escapes"], "whitespace_flexible": False}
"""The same without white space."""

VALUES = ("default", "examples")
"""Keywords with plain values that constrain nothing."""

CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Control characters without a short escape in JSON."""

_DIGITS = "(?:0[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])"
CONTROL_IN_PATTERN = re.compile(
    rf"\\x{_DIGITS}|\\u00{_DIGITS}|\\U000000{_DIGITS}|\\[xuU]\{{0*(?:{_DIGITS}|[0-7bBeEfF])\}}|\\[va]|{CONTROL.pattern}"
)
"""Such a character as patterns spell it. Bounds of a character range are allowed."""


class UnsupportedSchema(Exception):
    """The library does not enforce this schema. The message says why."""


def check(schema: Any) -> None:
    """Raises UnsupportedSchema if outputs might not match the schema."""
    if found := misspelt(schema):
        name, keyword = found
        raise UnsupportedSchema(f'it has "{name}", which is not a keyword: did you mean "{keyword}"?')
    _check(schema)


def _check(schema: Any) -> None:
    if isinstance(schema, list):
        for part in schema:
            _check(part)
    elif isinstance(schema, dict):
        _check_count(schema)
        for key, value in schema.items():
            _check_keyword(key, value)


def strict(source: str, schema: Any, options: Mapping[str, Any] = STRICT) -> str:
    """A schema's text with our options. All other text is unchanged, so that numbers keep every digit."""
    if schema is False:
        return source
    written = json.dumps({OWN_OPTIONS: options})
    if schema is True or not schema:
        return written
    return f"{written[:-1]}, {source.strip()[1:]}"


def _check_keyword(key: str, value: Any) -> None:
    match key:
        case "const" | "enum" | "required":
            _check_texts(value, key)
        case "pattern":
            _check_pattern(value)
        case "properties" | "patternProperties" if isinstance(value, dict):
            for name, schema in value.items():
                if key == "properties":
                    _check_texts(name, key)
                else:
                    _check_pattern(name)
                _check(schema)
        case _ if key not in VALUES:
            _check(value)


def _check_count(schema: dict[str, Any]) -> None:
    least, required = schema.get("minProperties"), schema.get("required")
    num_required = len(required) if isinstance(required, list) else 0
    if isinstance(least, int | float) and least - num_required > 1:
        raise UnsupportedSchema('its keyword "minProperties" may exceed the number of required properties by at most 1')


def _check_texts(value: Any, key: str) -> None:
    if isinstance(value, str):
        if CONTROL.search(value):
            raise UnsupportedSchema(f'"{key}" may only contain control characters that JSON has a short escape for')
    elif isinstance(value, list):
        for part in value:
            _check_texts(part, key)
    elif isinstance(value, dict):
        for name, part in value.items():
            _check_texts(name, key)
            _check_texts(part, key)


def _check_pattern(pattern: Any) -> None:
    if not isinstance(pattern, str):
        return
    for found in CONTROL_IN_PATTERN.finditer(pattern):
        start, end = found.span()
        before, after = pattern[max(start - 2, 0) : start], pattern[end : end + 2]
        begins = after[:1] == "-" and after[1:2] not in ("", "]") and not pattern.startswith(found[0], end + 1)
        ends = before[-1:] == "-" and before[-2:-1] not in ("", "[") and not pattern.endswith(found[0], 0, start - 1)
        if not (begins or ends):
            raise UnsupportedSchema(
                f"a pattern may only contain control characters that JSON has a short escape for: {pattern!r}"
            )
