"""OpenAI's custom tools, whose input is a text: functions with one argument, `input`. Pure."""

import json
import re

import msgspec
from msgspec import Raw

INPUT = "input"
"""The argument"""
INPUT_SCHEMA = Raw(
    b'{"type":"object","properties":{"input":{"type":"string"}},"required":["input"],"additionalProperties":false}'
)
_BEGUN = re.compile(
    r'\s*\{\s*"input"\s*:\s*"('
    r'(?:[^"\\]++|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*+)"
)
"""The argument as far as it was written, without a part of an escape. Nothing is tried again: that takes memory
for each character."""


def arguments_of(text: str) -> str:
    """The arguments of a chat's function that stands for a custom tool with this input."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    """The input of a custom tool from the arguments as the model wrote them, also if the reply ended within them."""
    try:
        decoded = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        decoded = None
    if isinstance(decoded, dict) and isinstance(text := decoded.get(INPUT), str):
        return text
    begun = _BEGUN.match(arguments)
    return arguments if begun is None else json.loads(f'"{begun[1]}"', strict=False)


def format_text(syntax: str | None, definition: str | None) -> str | None:
    """What the model reads about the format of the input"""
    return f"The input matches this {syntax or ''} grammar:\n{definition}" if definition else None
