"""Limits of clients' images."""

import msgspec


class ImageLimits(msgspec.Struct, array_like=True, frozen=True):
    max_bytes: int = 32 * 1024**2
    """Of the encoded image."""
    max_pixels: int = 50_000_000


LIMITS = ImageLimits()

IMAGE_ROLES = ("user", "tool")
"""Roles whose messages may have images."""
