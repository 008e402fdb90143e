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


def checked_reconnect_timeout(value: Any) -> float:
    """Seconds from 0 to MAX_RECONNECT_S. Raises TypeError or ValueError."""
    check_number("reconnect_timeout_s", value, 0, MAX_RECONNECT_S)
    return float(value)


def check_side(value: Any) -> None:
    """Raises ValueError unless `value` is a `truncation_side`."""
    if value not in (None, "left", "right"):
        raise ValueError(f"truncation_side must be left or right, not {shown(value)}")


def shown(value: Any) -> str:
    """A value's repr for an error message, cut to MAX_SHOWN_CHARS."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 1] + "…"
