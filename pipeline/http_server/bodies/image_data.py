"""How much of a large body is not base64. Pure.

A model that takes images has bodies of up to gateway.max_media_body_bytes. What is in them besides the images is
bounded by gateway.max_body_bytes, as in any other body: small values cost far more than long strings to decode, and
Python's lock is held meanwhile. So this is checked before a body is decoded, whatever its fields are called. The
parsers then know which of the strings are images.
"""

PIECE_BYTES = 4096
"""A piece counts whole: as base64 only if it has nothing else. So an image loses two of them at most."""
BASE64 = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=\\"
"""With the backslash, because JSON may write a slash as two characters."""


def num_other_bytes(body: bytes) -> int:
    """The bytes of the pieces that are not base64 throughout: an upper bound of what is beside images. Takes about 1 ms
    for a megabyte, in small parts, between which other threads may run."""
    view, found = memoryview(body), 0
    for begin in range(0, len(body), PIECE_BYTES):
        piece = bytes(view[begin : begin + PIECE_BYTES])
        if piece.translate(None, BASE64):
            found += len(piece)
    return found


def base64_bytes(num_bytes: int) -> int:
    """Characters of so many bytes in base64, with the padding."""
    return (num_bytes + 2) // 3 * 4
