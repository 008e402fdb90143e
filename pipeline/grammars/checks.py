"""What ingest and its checker say to each other."""

import msgspec


class Check(msgspec.Struct, array_like=True, frozen=True):
    number: int
    kind: str
    """As in `Grammar`"""
    source: str
    asked_s: float = 0.0
    """When, by time.monotonic()."""


class Checked(msgspec.Struct, array_like=True, frozen=True):
    number: int
    grammar: str = ""
    """In llguidance's own form; empty where it can't be used."""
    error: str = ""
    is_final: bool = True
    """Whether the same source will always come to this: not where the machine was too busy to tell."""
    took_s: float = 0.0
    """Processor time."""
    place: int = -1
    """Of the schema to blame, where it is one of several: of calls."""
