"""Checks that the client's parameter types share. Each error names the parameter and the valid values."""

import math
from typing import Any

MAX_INT32 = 2**31 - 1
MAX_SHOWN_CHARS = 100
MAX_RECONNECT_S = 1e6


def check_integer(name: str, value: Any, least: int, most: int) -> None:
    """Raises TypeError or ValueError unless `value` is an integer from `least` to `most`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not {shown(value)}")
    if not least <= value <= most:
        raise ValueError(f"{name} must be from {least} to {most}, not {value}")


def check_number(name: str, value: Any, least: float, most: float) -> None:
    """Raises TypeError or ValueError unless `value` is a finite number from `least` to `most`."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, not {shown(value)}")
    if not (math.isfinite(value) and least <= value <= most):
        raise ValueError(f"{name} must be from {least:g} to {most:g}, not {value:g}")


def check_above(name: str, value: Any, least: float, most: float) -> None:
    """As `check_number`, but `least` itself is not valid."""
    check_number(name, value, least, most)
    if value == least:
        raise ValueError(f"{name} must be above {least:g} and at most {most:g}, not {value:g}")


def check_flag(name: str, value: Any) -> None:
    """Raises TypeError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {shown(value)}")


def check_one_of(name: str, value: Any, values: tuple[Any, ...]) -> None:
    """Raises ValueError unless `value` is one of these."""
    if value not in values:
        raise ValueError(f"{name} must be {' or '.join(map(str, values))}, not {shown(value)}")


def checked_reconnect_timeout(value: Any) -> float:
    """Seconds from 0 to MAX_RECONNECT_S. Raises TypeError or ValueError."""
    check_number("reconnect_timeout_s", value, 0, MAX_RECONNECT_S)
    return float(value)


def shown(value: Any) -> str:
    """A value's repr for an error message, cut to MAX_SHOWN_CHARS."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 1] + "…"
