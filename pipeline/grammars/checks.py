"""The messages between ingest and its checker process."""

import msgspec

MAX_CHECKS = 8
"""Maximum number of concurrent checks; the others wait in ingest."""


class Check(msgspec.Struct, array_like=True, frozen=True):
    number: int
    kind: str
    """As in `Grammar`"""
    source: str
    asked_s: float = 0.0
    """Time of the request, by time.monotonic()."""


class Checked(msgspec.Struct, array_like=True, frozen=True):
    number: int
    grammar: str = ""
    """In llguidance's format; empty if it is invalid."""
    error: str = ""
    is_final: bool = True
    """Whether the same source always has this result. False if a busy machine may have caused a timeout."""
    took_s: float = 0.0
    """CPU time."""
    index: int = -1
    """Of tool calls: the index of the invalid schema; -1 if unknown."""
