"""Numbers of bytes in messages, in the form that settings take."""

UNITS = (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024))
LEAST = 10
"""The least number of a unit: a smaller one would lose digits that matter."""


def size_words(num_bytes: int, *, up: bool = False) -> str:
    """As `384MiB`, rounded down, or `up`: what is enough must not become less. Below 10 KiB, all digits."""
    for unit, unit_bytes in UNITS:
        if num_bytes >= LEAST * unit_bytes or (num_bytes >= unit_bytes and num_bytes % unit_bytes == 0):
            return f"{-(-num_bytes // unit_bytes) if up else num_bytes // unit_bytes}{unit}"
    return f"{num_bytes}B"
