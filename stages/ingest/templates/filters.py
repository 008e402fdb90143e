"""jinja2's filters and tests for chat templates. Each takes its cost from the budget first. Pure.

Not supported are filters of little use here (`pprint`, `striptags`, `urlize`, `wordwrap`, `xmlattr`, `filesizeformat`)
and `random`, which is not deterministic. Autoescape is always off: `safe` does nothing, and `escape` makes plain text.
"""

import html
import json
from collections.abc import Callable, Iterator, Sized
from functools import wraps
from typing import Any

from jinja2.filters import FILTERS as JINJAS
from jinja2.filters import do_indent, do_join, do_replace, do_round, sync_do_slice
from jinja2.tests import TESTS as JINJAS_TESTS

from pipeline.stages.ingest.templates import methods
from pipeline.stages.ingest.templates.budget import CHARS_PER_STEP, MAX_INT_BITS, MAX_VALUE_CHARS, ValueTooLarge, active

Function = Callable[..., Any]

MAX_DIGITS = 100
"""Largest precision of `round`."""

MAX_INDENT = 32
"""Largest indent of `tojson`."""

MAX_ATTRIBUTE_CHARS = 256


def made(value: Any) -> Any:
    """Take a new value's cost from the budget. Returns the value, or an iterator that is metered item by item."""
    if value is None or isinstance(value, bool):
        return value
    budget = active.budget
    if isinstance(value, str):
        budget.make(len(value))
    elif isinstance(value, list | tuple):
        budget.make_list(len(value))
    elif isinstance(value, Iterator):
        return metered(value)
    elif isinstance(value, int):
        if value.bit_length() > MAX_INT_BITS:
            raise ValueTooLarge(f"it makes a number of {value.bit_length()} bits, the limit is {MAX_INT_BITS}")
    elif isinstance(value, dict):
        budget.make_list(len(value) * 8)
    return value


def metered(items: Iterator[Any]) -> Iterator[Any]:
    budget = active.budget
    for item in items:
        budget.spend(1)
        yield item


def _reads_all(function: Function) -> Function:
    """A filter or test that reads its arguments completely."""

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            active.budget.read(value)
        return made(function(*args, **kwargs))

    return bounded


def _reads_items(function: Function) -> Function:
    """A filter that copies the items of a list."""

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            _take(value)
        return made(function(*args, **kwargs))

    return bounded


def _take(value: Any) -> None:
    if isinstance(value, str):
        # As a list of characters, or as the path of an attribute.
        active.budget.spend(1 + len(value) // 8)
    elif isinstance(value, Sized):
        active.budget.spend(1 + len(value) // 4)


def _splits(function: Function) -> Function:
    """A filter that processes a text character by character, or word by word, in Python."""

    @wraps(function)
    def bounded(value: Any) -> Any:
        active.budget.spend(active.budget.read(value) // 2)
        return made(function(value))

    return bounded


def _makes_rows(function: Function) -> Function:
    """`batch` and `slice`, which pad a row to any length."""

    @wraps(function)
    def bounded(value: Any, num: int, fill_with: Any = None) -> Any:
        items = value if isinstance(value, Sized) else list(value)
        active.budget.make_list(max(num, len(items)))
        return made(iter(function(items, num, fill_with)))

    return bounded


def _compares(function: Function) -> Function:
    """A filter that compares the items of a list with each other."""

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        budget = active.budget
        index = 1 if hasattr(function, "jinja_pass_arg") else 0
        items = args[index] if isinstance(args[index], Sized) else list(args[index])
        budget.spend(budget.weight(items) * max(1, len(items).bit_length()) // 4)
        for value in (*args[index + 1 :], *kwargs.values()):
            _check_attribute(value)
        return made(function(*args[:index], items, *args[index + 1 :], **kwargs))

    return bounded


def _check_attribute(value: Any) -> None:
    """Bound an attribute path such as `a.b.c`, which is looked up part by part in each item."""
    if isinstance(value, str) and len(value) > MAX_ATTRIBUTE_CHARS:
        raise ValueTooLarge(f"it uses an attribute name of {len(value)} characters, the limit is {MAX_ATTRIBUTE_CHARS}")


def _picks(function: Function) -> Function:
    """`map`, `select` and similar filters, which are lazy."""

    @wraps(function)
    def bounded(context: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            _check_attribute(kwargs.get("attribute", args[0] if args else ""))
        return metered(iter(function(context, value, *args, **kwargs)))

    return bounded


def _center(value: str, width: int = 80) -> str:
    text = _text(value)
    active.budget.make(methods.padded(text, [width], {}))
    return text.center(width)


def _trim(value: Any, chars: str | None = None) -> str:
    text = _text(value)
    active.budget.make(methods.stripped(text, [chars]))
    return text.strip(chars)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(_read(value))


def _read(value: Any) -> Any:
    active.budget.read(value)
    return value


@wraps(do_replace)
def _replace(eval_ctx: Any, s: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, was, becomes = _text(s), _text(old), _text(new)
    active.budget.make(methods.replaced(text, [was, becomes], {} if count is None else {"count": count}))
    return str(do_replace(eval_ctx, text, was, becomes, count))


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    if args and kwargs:
        raise TypeError("format takes positional or keyword arguments, not both")
    return methods.percent(_text(value), kwargs or args)


def _indent(s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = _text(s)
    size = len(width) if isinstance(width, str) else max(width, 0)
    active.budget.make(len(text) + (text.count("\n") + 2) * size)
    return str(do_indent(text, width, first, blank))


@wraps(do_join)
def _join(eval_ctx: Any, value: Any, d: Any = "", attribute: Any = None) -> str:
    _check_attribute(attribute)
    items = value if isinstance(value, Sized) else list(value)
    between = _text(d)
    active.budget.make(active.budget.read(items) + len(items) * len(between))
    return str(do_join(eval_ctx, items, between, attribute))


def _round(value: Any, precision: int = 0, method: Any = "common") -> Any:
    if abs(precision) > MAX_DIGITS:
        raise ValueTooLarge(f"it rounds to {str(precision)[:20]} digits, the limit is {MAX_DIGITS}")
    return made(do_round(value, precision, method))


def _sum(environment: Any, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
    items = iterable if isinstance(iterable, Sized) else list(iterable)
    # Each addition of lists copies the sum so far.
    times = 1 if isinstance(start, int | float) else max(1, len(items))
    active.budget.spend(active.budget.read(items) * times // 8)
    _check_attribute(attribute)
    return made(JINJAS["sum"](environment, items, attribute, start))


def _escape(value: Any) -> str:
    text = _text(value)
    active.budget.make(len(text))
    # Spelled as in markupsafe.
    return str(made(html.escape(text).replace("&quot;", "&#34;").replace("&#x27;", "&#39;")))


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the HTML escapes of jinja2's own filter, as in transformers."""
    budget = active.budget
    budget.make(budget.read(value))
    options: dict[str, Any] = {"ensure_ascii": ensure_ascii, "separators": separators, "sort_keys": sort_keys}
    if separators is not None and sum(map(len, separators)) > MAX_INDENT:
        raise ValueTooLarge(f"it separates JSON by more than {MAX_INDENT} characters")
    if indent is None:
        return str(made(json.dumps(value, **options)))
    if (len(indent) if isinstance(indent, str) else indent) > MAX_INDENT:
        raise ValueTooLarge(f"it indents JSON by more than {MAX_INDENT} characters")
    # The size of the indents depends on the levels, so each piece is counted.
    pieces = []
    num_chars = 0
    for piece in json.JSONEncoder(indent=indent, **options).iterencode(value):
        num_chars += len(piece)
        budget.spend(1 + len(piece) // CHARS_PER_STEP)
        if num_chars > MAX_VALUE_CHARS:
            raise ValueTooLarge(f"it makes JSON of more than {MAX_VALUE_CHARS} characters")
        pieces.append(piece)
    return "".join(pieces)


def _named(names: str, bound: Callable[[Function], Function] = lambda function: function) -> dict[str, Function]:
    return {name: bound(JINJAS[name]) for name in names.split()}


FILTERS: dict[str, Function] = {
    **_named("abs attr count d default first last length"),
    **_named("capitalize float int lower string truncate upper", _reads_all),
    **_named("items list reverse", _reads_items),
    **_named("title urlencode wordcount", _splits),
    "batch": _makes_rows(JINJAS["batch"]),
    "slice": _makes_rows(sync_do_slice),
    **_named("dictsort groupby max min sort unique", _compares),
    **_named("map reject rejectattr select selectattr", _picks),
    "center": _center,
    "e": _escape,
    "escape": _escape,
    "forceescape": _escape,
    "format": _format,
    "indent": _indent,
    "join": _join,
    "replace": _replace,
    "round": _round,
    "safe": lambda value: value,
    "sum": _sum,
    "tojson": to_json,
    "trim": _trim,
}

COMPARING = {"in", "==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", "ge", ">=", "<", "lt", "lessthan"}
READING = COMPARING | {"<=", "le", "lower", "upper"}

TESTS: dict[str, Function] = {
    name: _reads_all(test) if name in READING else test for name, test in dict[str, Any](JINJAS_TESTS).items()
}
