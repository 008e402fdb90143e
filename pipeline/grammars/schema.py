"""What of a JSON schema would not be kept to, though llguidance takes it; and the options that it is given.

The library refuses keywords that it does not know. In these cases, found by trying, it would let an output through that
does not validate:

- A property's name spelled with escapes is taken for another name. So with our options each character is spelled in one
  way, and \\u is none of them.
- Characters that can then not be spelled, which are controls, are left out of what is given as a whole (`const`, names,
  parts of a pattern): such schemas are refused.
- Names that the schema does not list may come twice, and are then one property: it can't be counted on two of them.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from pipeline.grammars.keywords import misspelt

OWN_OPTIONS = "x-guidance"
"""A schema's options for the library: a client's would let it ignore keywords, or write what is no JSON."""

STRICT = {"json_allowed_escapes": 'nrbtf\\"', "whitespace_pattern": r" |\n[ \t]{0,64}"}
"""Ours. Space is one blank, or a new line and what it is indented by: a small model that may write any amount goes on
writing it."""

COMPACT = {"json_allowed_escapes": STRICT["json_allowed_escapes"], "whitespace_flexible": False}
"""The same, without any space."""

VALUES = ("default", "examples")
"""Keywords that hold no schemas, and mean nothing here; besides `const` and `enum`."""

CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Characters that have no escape of their own."""

_DIGITS = "(?:0[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])"
CONTROL_IN_PATTERN = re.compile(
    rf"\\x{_DIGITS}|\\u00{_DIGITS}|\\U000000{_DIGITS}|\\[xuU]\{{0*(?:{_DIGITS}|[0-7bBeEfF])\}}|\\[va]|{CONTROL.pattern}"
)
"""Such a character as a pattern spells it. The ends of a range of several are none."""


class Untrue(Exception):
    """Outputs could not be relied on to match; says why."""


def check(schema: Any) -> None:
    """Raises Untrue."""
    if found := misspelt(schema):
        name, keyword = found
        raise Untrue(f'it has "{name}", which is not a keyword: did you mean "{keyword}"?')
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
    """A schema's text with options of ours, and else as it was written: every digit of a number counts."""
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
        raise Untrue('its keyword "minProperties" is supported for one property more than are required')


def _check_texts(value: Any, key: str) -> None:
    if isinstance(value, str):
        if CONTROL.search(value):
            raise Untrue(f'of control characters, "{key}" may have those alone that JSON has a letter for')
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
        before, after = pattern[: found.start()], pattern[found.end() :]
        begins = after[:1] == "-" and after[1:2] not in ("", "]") and not after[1:].startswith(found[0])
        ends = before[-1:] == "-" and before[-2:-1] not in ("", "[") and not before[:-1].endswith(found[0])
        if not (begins or ends):
            raise Untrue(
                f"of control characters, a pattern may name those alone that JSON has a letter for: {pattern!r}"
            )
