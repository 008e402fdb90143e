"""Bounds the memory of bodies that are being received.

with budget.upload(declared_bytes) as upload: … upload.grow(num_bytes) … ──► released at the end
"""

from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.stages.gateway.errors import overloaded

NUM_BODIES = 16
"""Bodies of the largest size that may be received at once. Parsing is serial, so more would not be served sooner. At
4 MiB each, which are copied once, they take at most 128 MiB."""
SMALL_BYTES = 65536
"""Bodies up to this size are not counted, so slow large bodies don't block them. A connection may buffer as much
anyway."""


class UploadBudget:
    """The budget of one gateway."""

    def __init__(self, max_body_bytes: int) -> None:
        self.max_bytes = NUM_BODIES * max_body_bytes
        self.num_bytes = 0

    @contextmanager
    def upload(self, declared_bytes: int) -> Iterator["Upload"]:
        """Reserve bytes for a body while it is received. `declared_bytes` is 0 if its length is unknown. Raises
        ApiError, 503, if the budget is used up."""
        upload = Upload(self)
        try:
            upload.grow(declared_bytes)
            yield upload
        finally:
            self.num_bytes -= upload.num_counted


class Upload:
    """One body."""

    def __init__(self, budget: UploadBudget) -> None:
        self._budget = budget
        self.num_counted = 0

    def grow(self, num_bytes: int) -> None:
        """Reserve `num_bytes` in all. Raises ApiError, 503."""
        if num_bytes <= max(SMALL_BYTES, self.num_counted):
            return
        num_more = num_bytes - self.num_counted
        num_left = self._budget.max_bytes - self._budget.num_bytes
        if num_more > num_left:
            raise overloaded(
                f"{num_left} of {self._budget.max_bytes} bytes are free for large bodies that are being received, and "
                f"this body needs {num_more} more"
            )
        self._budget.num_bytes += num_more
        self.num_counted = num_bytes
