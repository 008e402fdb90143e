"""Methods of text, lists and numbers that a template may call, and bounds of their results. Pure.

Methods that are not listed are refused: chat templates don't need bytes, codecs and translation tables, and some take
quadratic time. The caller counts results; these bounds are for what must be known before a result is made.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
from jinja2.sandbox import SandboxedEnvironment, SandboxedFormatter

from pipeline.stages.ingest.templates.budget import ValueTooLarge, active

MAX_STRIPPED_CHARS = 256
"""`strip` searches its argument for each character of the text."""

MAX_WIDTH = 2**16
"""The largest width of a format."""

DIGITS = re.compile(r"\d+")
MAX_KEY_CHARS = 256
"""The longest name in a format. Without a limit, each of many that have no end is read up to the text's end."""

CONVERSION = re.compile(
    rf"%(?P<key>\([^)]{{0,{MAX_KEY_CHARS}}}\)?)?[#0\- +]*(?P<width>\*|\d*)(?:\.(?P<precision>\*|\d*))?[hlL]?.",
    re.DOTALL,
)

Bound = Callable[[str, Sequence[Any], Mapping[str, Any]], int]
"""Maps a text and a method's arguments to the most characters of the result."""


def check(method: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Take the cost of calling a builtin method from the budget. Raises SecurityError if it is not listed, OutOfTime or
    ValueTooLarge."""
    owner, name = method.__self__, method.__name__
    if name not in METHODS.get(type(owner), ()):
        raise jinja2.exceptions.SecurityError(f"a chat template can't call {name!r} of {type(owner).__name__!r}")
    active.budget.read(owner)
    if isinstance(owner, str) and (bound := BOUNDS.get(name)) is not None:
        active.budget.make(bound(owner, args, kwargs))


def bounded_format(environment: SandboxedEnvironment, text: str, *, is_map: bool) -> Callable[..., str]:
    """The text's `format`, or `format_map`."""
    formatter = BoundedFormatter(environment)

    def format_text(*args: Any, **kwargs: Any) -> str:
        if is_map:
            (names,) = args
            return formatter.vformat(text, (), names)
        return formatter.vformat(text, args, kwargs)

    return format_text


class BoundedFormatter(SandboxedFormatter):
    """jinja2's sandboxed `str.format`, whose fields take their cost from the budget."""

    def convert_field(self, value: Any, conversion: Any) -> Any:
        if conversion is not None:
            active.budget.make(active.budget.read(value))
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        width = sum(_width(digits) for digits in DIGITS.findall(format_spec))
        active.budget.make(active.budget.read(value) + width)
        return super().format_field(value, format_spec)


def percent(text: str, args: Any) -> str:
    """`text % args`."""
    size = len(text)
    weight = active.budget.read(args)
    for conversion in CONVERSION.finditer(text):
        active.budget.spend(1)
        key, width, precision = conversion["key"], conversion["width"], conversion["precision"]
        if key and not key.endswith(")"):
            raise ValueTooLarge(f"it formats with a name that has no end within {MAX_KEY_CHARS} characters")
        if "*" in (width, precision):
            raise ValueTooLarge("it takes a format width from its arguments")
        size += _width(width) + _width(precision) + (weight if key else 0)
    active.budget.make(size + weight)
    return str(text % args)


def _width(digits: str | None) -> int:
    if not digits:
        return 0
    if len(digits) > 6 or int(digits) > MAX_WIDTH:
        raise ValueTooLarge(f"it formats with a width of {digits[:20]}, the limit is {MAX_WIDTH}")
    return int(digits)


def stripped(text: str, args: Sequence[Any], _: Mapping[str, Any] = {}) -> int:
    if args and isinstance(args[0], str) and len(args[0]) > MAX_STRIPPED_CHARS:
        raise ValueTooLarge(f"it strips {len(args[0])} different characters, the limit is {MAX_STRIPPED_CHARS}")
    return len(text)


def replaced(text: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    match args:
        case [str() as old, str() as new, *count]:
            limit = count[0] if count else kwargs.get("count", -1)
            found = text.count(old)
            num = min(found, limit) if isinstance(limit, int) and limit >= 0 else found
            return len(text) + num * max(len(new) - len(old), 0)
    return len(text)


def joined(text: str, args: Sequence[Any], _: Mapping[str, Any]) -> int:
    match args:
        case [list() | tuple() as parts]:
            return sum(len(part) for part in parts if isinstance(part, str)) + len(text) * len(parts)
        case [dict() as parts]:
            return joined(text, [list(parts)], {})
        case [str() as parts]:
            return len(parts) * (len(text) + 1)
    raise ValueTooLarge("it joins a value that is not a list: convert it to a list first")


def padded(text: str, args: Sequence[Any], _: Mapping[str, Any]) -> int:
    return max(len(text), args[0]) if args and isinstance(args[0], int) else len(text)


def with_tabs(text: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    size = args[0] if args else kwargs.get("tabsize", 8)
    return len(text) + text.count("\t") * max(size, 0) if isinstance(size, int) else len(text)


BOUNDS: dict[str, Bound] = {
    "center": padded,
    "expandtabs": with_tabs,
    "join": joined,
    "ljust": padded,
    "lstrip": stripped,
    "replace": replaced,
    "rjust": padded,
    "rstrip": stripped,
    "strip": stripped,
    "zfill": padded,
}

TEXT_METHODS = (
    "capitalize casefold center count endswith expandtabs find index isalnum isalpha isascii isdecimal isdigit "
    "isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip partition removeprefix "
    "removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title "
    "upper zfill"
)

METHODS: dict[type, frozenset[str]] = {
    str: frozenset(TEXT_METHODS.split()),
    dict: frozenset(["copy", "get", "items", "keys", "values"]),
    list: frozenset(["copy", "count", "index"]),
    tuple: frozenset(["count", "index"]),
    range: frozenset(["count", "index"]),
    int: frozenset(["bit_count", "bit_length"]),
    float: frozenset(["is_integer"]),
}
