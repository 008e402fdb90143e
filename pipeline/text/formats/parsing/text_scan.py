"""Helpers of parsers that look for one of several texts at an offset of streamed text."""

from collections.abc import Sequence

SPACE = " \t\r\n"


def starts_with(text: str, at: int, options: Sequence[str]) -> str | None:
    """The option that `text[at:]` starts with, "" if it might once there is more text, None if none."""
    is_possible = False
    for option in options:
        if text.startswith(option, at):
            return option
        is_possible |= len(text) - at < len(option) and option.startswith(text[at:])
    return "" if is_possible else None


def skip_space(text: str, at: int) -> int:
    """The offset of the first character at or after `at` that is not white space."""
    while at < len(text) and text[at] in SPACE:
        at += 1
    return at
