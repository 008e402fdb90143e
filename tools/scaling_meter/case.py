"""One measurement: an input that grows, and the function that reads it."""

from collections.abc import Callable
from dataclasses import dataclass

MAX_BODY = 4 * 1024**2
"""`gateway.max_body_bytes`: no input that is part of a body is longer."""
LOOP_MS = 50.0
"""The longest that a loop which others share may be busy with one input."""

Make = Callable[[int], Callable[[], object]]


@dataclass(frozen=True)
class Case:
    """`make(n)` prepares an input of about n bytes, and returns the work to measure. Work that refuses its input
    returns as well: it raises only if there is a fault."""

    group: str
    """What reads the input: a route, a format, a stage"""
    name: str
    make: Make
    max_n: int = MAX_BODY
    bound_ms: float = LOOP_MS
    """For the largest input"""
    first_n: int = 256
    loop_n: int = 0
    """Inputs up to this size are read in a loop, and must not take longer than LOOP_MS; larger ones in a thread."""

    @property
    def title(self) -> str:
        return f"{self.group} {self.name}"
