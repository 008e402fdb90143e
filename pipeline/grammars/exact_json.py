"""JSON with numbers as they are written: no digit is lost between a client's schema and the library."""

import json
from collections.abc import Callable
from typing import Any, NoReturn

MAX_INT_CHARS = 400
"""Longer integers are kept as text: Python takes quadratic time for them. No float is as large."""


class Written(float):
    """A number with a point or an exponent. Its value may be rounded, or infinite; `text` is exact."""

    text: str

    def __new__(cls, text: str) -> "Written":
        number = super().__new__(cls, text)
        number.text = text
        return number


def decoded(source: str, refuse: Callable[[str], NoReturn]) -> Any:
    """The value of a JSON text; `refuse` is called for NaN and infinities. Raises ValueError, RecursionError."""
    return json.loads(source, parse_constant=refuse, parse_float=Written, parse_int=_integer)


def encoded(value: Any) -> str:
    """The JSON text of a value of `decoded`. Raises RecursionError."""
    match value:
        case Written():
            return value.text
        case dict():
            return "{" + ", ".join(f"{json.dumps(name)}: {encoded(part)}" for name, part in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(encoded, value)) + "]"
    return json.dumps(value)


def _integer(text: str) -> Any:
    return int(text) if len(text) <= MAX_INT_CHARS else Written(text)
