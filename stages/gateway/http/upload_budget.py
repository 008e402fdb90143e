"""Bytes of bodies that are being read: what a client can make a gateway hold before its request is anything.

with room.upload(declared) as upload: … upload.grow(num_bytes) … ──► given back, whichever way it ends
"""

from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.stages.gateway.errors import overloaded

NUM_BODIES = 16
"""Bodies of the largest size that may come at once. A body is parsed in one go as soon as it is whole, so that more of
them are not served any sooner; and at 4 MiB each, while it grows and is copied once, they take at most 128 MiB."""
SMALL_BYTES = 65536
"""Bodies up to this size are not counted, so that they are not held up by large ones that come slowly: the connection
itself may buffer as much, whatever is read from it."""


class UploadRoom:
    """Owns the count of one gateway."""

    def __init__(self, max_body_bytes: int) -> None:
        self.max_bytes = NUM_BODIES * max_body_bytes
        self.num_bytes = 0

    @contextmanager
    def upload(self, declared_bytes: int) -> Iterator["Upload"]:
        """Room for a body of a declared length, 0 where it has none, while it is read. Raises ApiError, 503."""
        upload = Upload(self)
        try:
            upload.grow(declared_bytes)
            yield upload
        finally:
            self.num_bytes -= upload.num_counted


class Upload:
    """One body."""

    def __init__(self, room: UploadRoom) -> None:
        self._room = room
        self.num_counted = 0

    def grow(self, num_bytes: int) -> None:
        """It has so many bytes by now, or will have. Raises ApiError, 503."""
        if num_bytes <= max(SMALL_BYTES, self.num_counted):
            return
        num_more = num_bytes - self.num_counted
        num_left = self._room.max_bytes - self._room.num_bytes
        if num_more > num_left:
            raise overloaded(
                f"of the {self._room.max_bytes} bytes that large bodies on their way here may have together, "
                f"{num_left} are left, and this one needs {num_more} more"
            )
        self._room.num_bytes += num_more
        self.num_counted = num_bytes
