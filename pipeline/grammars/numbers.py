"""The numbers of schemas. llguidance keeps them as 64-bit floats, so a number that a float can't hold would become
another one.

- In `enum` and `const`, such a number is refused.
- A bound of the range of a machine type, such as that of int64, uint64 or float32, is replaced by the largest one that
  the library enforces exactly: outputs still match the schema. Other bounds that a float can't hold are refused.
- `multipleOf` may have nine digits: the library computes with 32 bits.
"""

from decimal import Decimal
from typing import Any

from pipeline.grammars.exact_json import Written
from pipeline.grammars.schema import UnsupportedSchema

MAX_SAFE = 2**53
"""The floats hold all integers up to here."""

INT64_MAX = 2**63 - 1
LARGEST = 2**63 - 1024
"""The largest float below 2^63. The library enforces no bound of integers beyond it, and none of other numbers beyond
`MAX_SAFE`."""

MAX_MULTIPLE = 2**32 - 1
MAX_SHOWN_CHARS = 40
MAX_EXPONENT = 60
"""Places behind the point; the library's automaton has one level for each."""

LOWER = ("minimum", "exclusiveMinimum")
UPPER = ("maximum", "exclusiveMaximum")


def check_values(key: str, value: Any) -> None:
    """Raises UnsupportedSchema if a value of `enum` or `const` has a number that would change."""
    if isinstance(value, list):
        for part in value:
            check_values(key, part)
    elif isinstance(value, dict):
        for part in value.values():
            check_values(key, part)
    elif _is_number(value) and not _is_exact(value):
        raise _inexact(key, value, "allow strings instead")


def with_enforced_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema whose own bounds the library enforces exactly. Raises UnsupportedSchema if there is none."""
    if "multipleOf" in schema:
        _check_multiple(schema["multipleOf"])
    for key in (*LOWER, *UPPER):
        if _is_number(schema.get(key)):
            schema = _with_enforced_bound(schema, key)
    return schema


def _with_enforced_bound(schema: dict[str, Any], key: str) -> dict[str, Any]:
    value, is_integer = schema[key], _has_only_integers(schema.get("type"))
    number, is_lower = _decimal(value), key in LOWER
    sign = -1 if is_lower else 1
    if key == "maximum" and is_integer and number == INT64_MAX:
        return schema  # the library rounds up, and then cuts it to its own integers
    largest = LARGEST if is_integer else MAX_SAFE
    if abs(number) > largest:
        if number * sign < 0:
            raise _inexact(key, value, f"this bound may be at most {largest}")
        rest = {name: part for name, part in schema.items() if name != key}
        bound = INT64_MAX if is_integer and not is_lower else sign * largest
        return _tightened(rest, "minimum" if is_lower else "maximum", bound)
    if abs(number) >= MAX_SAFE and key.startswith("exclusive"):
        if not is_integer:
            raise _inexact(key, value, f'use "{key.removeprefix("exclusive").lower()}"')
        whole = int(number.to_integral_value("ROUND_FLOOR" if is_lower else "ROUND_CEILING")) - sign
        rest = {name: part for name, part in schema.items() if name != key}
        return _with_enforced_bound(
            _tightened(rest, "minimum" if is_lower else "maximum", whole), "minimum" if is_lower else "maximum"
        )
    if not _is_exact(value):
        raise _inexact(key, value, "use a bound that a 64-bit float holds")
    return schema


def _tightened(schema: dict[str, Any], key: str, bound: int) -> dict[str, Any]:
    """A schema with a bound in addition to the one of the same keyword that it may have."""
    present = schema.get(key)
    if _is_number(present) and (_decimal(present) < bound) == (key == "maximum"):
        return schema
    return schema | {key: bound}


def _check_multiple(value: Any) -> None:
    if not _is_number(value):
        return
    number = _decimal(value).normalize()
    if number <= 0:
        raise UnsupportedSchema('its keyword "multipleOf" must be greater than 0')
    digits = number.as_tuple()
    exponent = int(digits.exponent)
    scaled = int("".join(map(str, digits.digits))) if len(digits.digits) <= 10 else MAX_MULTIPLE + 1
    if scaled * 10 ** min(max(exponent, 0), 10) > MAX_MULTIPLE or exponent < -MAX_EXPONENT or not _is_exact(value):
        raise _inexact("multipleOf", value, "it may have nine digits")


def _has_only_integers(types: Any) -> bool:
    return types == "integer" or (isinstance(types, list) and "integer" in types and "number" not in types)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _decimal(value: Any) -> Decimal:
    """The exact value; that of a number outside of the range of floats is replaced by 1e±400."""
    if not isinstance(value, Written):
        return Decimal(value)
    if float(value) not in (0.0, float("inf"), float("-inf")):
        return Decimal(value.text)
    if not value and not any(digit in "123456789" for digit in value.text.lower().partition("e")[0]):
        return Decimal(0)
    return Decimal(f"{'-' if value.text.startswith('-') else ''}1e{400 if value else -400}")


def _is_exact(value: Any) -> bool:
    """Whether the library keeps a number as it is."""
    if isinstance(value, int):
        return value == INT64_MAX or (abs(value) <= LARGEST and int(float(value)) == value)
    if float(value) in (float("inf"), float("-inf")):
        return False
    number = _decimal(value)
    if number.is_zero():
        return True
    if number.adjusted() < -MAX_EXPONENT:
        return False
    # Integers within int64 are kept as such, the others as the shortest text of the float.
    return number == (Decimal(float(value)) if MAX_SAFE <= abs(number) <= LARGEST else Decimal(repr(float(value))))


def _inexact(key: str, value: Any, hint: str) -> UnsupportedSchema:
    text = value.text if isinstance(value, Written) else str(value)
    shown = text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}…"
    return UnsupportedSchema(f'its keyword "{key}" has the number {shown}, which can\'t be enforced exactly: {hint}')
