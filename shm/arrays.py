"""How an array travels inside a message: inline, or as a reference into a shared segment."""

import msgspec

INLINE_BYTES = 4096
"""Arrays up to this size travel inside the message; larger ones go by reference."""


class ShmRef(msgspec.Struct, array_like=True, frozen=True):
    """Bytes `offset .. offset + length` of the segment called `segment`.

    `generation` identifies this use of the slab. The arena's owner ignores a release of an older generation.
    """

    segment: str
    offset: int
    length: int
    generation: int


Array = bytes | ShmRef
"""Packed little-endian numbers. The message field defines their dtype."""
