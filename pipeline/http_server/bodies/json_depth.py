"""The nesting depth of a JSON body, and what it costs to decode it, computed from its bytes before that.

Code that recurses into a decoded value (a template, a schema compiler, Python's json) fails or becomes slow at some
depth, so deeper bodies are refused first. And the decoder holds Python's lock (the GIL) until all is decoded, so what
would take too long is refused, too. Only marks outside of strings count:

    {"stop": ["[[[", "\\"]"], "x": {}}
    +        +             -       +-- → 2 levels

A body is looked at in pieces, between which other threads can have the lock: 32 MiB of base64 cost 15 ms in all, and of
brackets half a second if nothing ends it before.
"""

from collections.abc import Iterator

import numpy as np

from pipeline.http_server.errors import ApiError, invalid

PIECE_BYTES = 128 * 1024
"""Looked at while Python's lock may be held: 2 ms at most."""
LOCK_MS = 50
"""The longest that one body may hold Python's lock while it is decoded."""
MAX_WIDE_BYTES = 12 * 1024**2
"""A string with escapes or other characters than ASCII takes three times the time and up to four times the memory of
its bytes: this one 30 ms."""
_QUOTE = ord('"')
_MARKS = b'"[]{}:,'
_OTHERS = bytes(set(range(256)) - set(_MARKS))
_STEPS = np.zeros(256, np.int8)
_STEPS[[ord("["), ord("{")]] = 1
_STEPS[[ord("]"), ord("}")]] = -1
_COSTS_NS = np.zeros(256, np.int16)
"""What the decoder takes for each, in nanoseconds, if the value becomes Python's. Measured with 100,000 of them."""
_COSTS_NS[[ord("["), ord("{"), ord(":")]] = 200
_COSTS_NS[_QUOTE] = 60
_COSTS_NS[ord(",")] = 20
BYTE_NS = 2
"""A byte of what is long and not in strings: spaces, digits."""


class Shape:
    """What `shape_of` has found so far."""

    def __init__(self) -> None:
        self.depth = 0
        """The largest number of nested arrays and objects. Exact for valid JSON."""
        self.cost_ns = 0
        """Of decoding, besides the bytes of strings."""
        self.longest_wide = 0
        """Bytes of the longest string that has not only plain ASCII, up to its last piece."""


def shapes_of(body: bytes, begin: int = 0) -> Iterator[Shape]:
    """Look at a body from `begin` on, and yield the same object after each piece."""
    shape, level, is_inside, run, is_wide = Shape(), 0, False, 0, False
    while begin < len(body):
        piece = body[begin : begin + PIECE_BYTES]
        if piece.endswith(b"\\") and (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # it escapes the next byte
            piece = body[begin : begin + PIECE_BYTES + 1]
        begin += len(piece)
        # An odd number of backslashes escapes a quote: remove pairs first, left to right.
        has_escapes = b"\\" in piece
        plain = piece.replace(b"\\\\", b"").replace(b'\\"', b"") if has_escapes else piece
        if is_inside and b'"' not in plain:
            run, is_wide = run + len(piece), is_wide or has_escapes or not piece.isascii()
            if is_wide:
                shape.longest_wide = max(shape.longest_wide, run)
        else:
            if is_inside and (is_wide or _is_wide(plain[: plain.find(b'"')])):
                shape.longest_wide = max(shape.longest_wide, run)
            end = plain[plain.rfind(b'"') + 1 :]
            run, is_wide = len(end), _is_wide(end)
            if b'"' not in plain:
                shape.cost_ns += BYTE_NS * len(piece)
            marks = np.frombuffer(plain.translate(None, _OTHERS), np.uint8)
            if len(marks):
                inside = np.logical_xor.accumulate(marks == _QUOTE) ^ is_inside  # includes the opening quote
                steps = np.where(inside, np.int8(0), _STEPS[marks])
                levels = np.cumsum(steps, dtype=np.int32)
                shape.depth = max(shape.depth, level + int(levels.max()))
                shape.cost_ns += int(np.where(inside, np.int16(0), _COSTS_NS[marks]).sum(dtype=np.int64))
                level, is_inside = level + int(levels[-1]), bool(inside[-1])
        yield shape


def _is_wide(text: bytes) -> bool:
    return not text.isascii() or b"\\" in text


def depth_of(body: bytes) -> int:
    """The largest number of nested arrays and objects. Exact for valid JSON."""
    return max((shape.depth for shape in shapes_of(body)), default=0)


def check_depth(body: bytes, max_depth: int) -> None:
    """Raises ApiError, 400, if the body has more levels."""
    if body.count(b"[") + body.count(b"{") > max_depth and depth_of(body) > max_depth:
        raise too_deep(max_depth)


def check_large(body: bytes, max_depth: int, max_wide_bytes: int = MAX_WIDE_BYTES, begin: int = 0) -> None:
    """Check a body of any size from `begin` on, which may then be decoded in a thread. Raises ApiError, 400, if it has
    more levels, or if to decode it would hold Python's lock for longer than LOCK_MS."""
    for shape in shapes_of(body, begin):
        if shape.depth > max_depth:
            raise too_deep(max_depth)
        if shape.cost_ns > LOCK_MS * 1_000_000:
            raise too_many_values()
        if shape.longest_wide > max_wide_bytes:
            what = "a text in the body, which has escapes or characters besides ASCII,"
            raise invalid(None, f"{what} has more than {max_wide_bytes} bytes", "too_long")


def too_deep(max_depth: int) -> ApiError:
    message = f"the body's JSON is nested too deeply: the limit is {max_depth} levels of arrays and objects"
    return invalid(None, message, "invalid_json")


def too_many_values() -> ApiError:
    """400: what is to be decoded would take too long."""
    most = LOCK_MS * 1_000_000 // int(_COSTS_NS[ord(":")])
    message = f"the body has too many values: at most {most} keys, arrays and objects, and ten times as many numbers"
    return invalid(None, f"{message}; send several requests", "too_many_values")
