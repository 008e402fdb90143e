"""Where special tokens are in a text, as detokenize tells the gateway.

A model can write the characters of `</think>` with that special token, or with ordinary ones. Only the ids tell which,
and a text has none. So a text whose special tokens mean something comes with their spans.
"""

from collections.abc import Iterator
from struct import Struct

_SPAN = Struct("<3i")
SPAN_BYTES = _SPAN.size


def packed(offset: int, num_chars: int, token_id: int) -> bytes:
    """One span: `num_chars` characters of the text from `offset` on are the special token `token_id`. The spans of a
    text are joined in order. Each has a character or more, and they don't overlap."""
    return _SPAN.pack(offset, num_chars, token_id)


def unpacked(spans: bytes | bytearray) -> Iterator[tuple[int, int, int]]:
    """The offset, the number of characters and the token id of each span."""
    return _SPAN.iter_unpack(spans)


def behind(spans: bytes, offset: int) -> bytes:
    """The spans that begin at `offset` or later."""
    at = 0
    while at < len(spans) and _SPAN.unpack_from(spans, at)[0] < offset:
        at += SPAN_BYTES
    return spans[at:]


def end_of(spans: bytes) -> int:
    """The offset behind the last of some spans."""
    offset, num_chars, _ = _SPAN.unpack_from(spans, len(spans) - SPAN_BYTES)
    return int(offset + num_chars)
