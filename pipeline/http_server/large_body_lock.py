"""Serializes the parsing of large bodies.

4 MiB of small values take 50 ms to decode, and up to half a second to check. A thread does that, so that the event loop
goes on, but both need Python's lock. Many large bodies in a row would delay all other requests. So they are parsed one
at a time, with a pause after each that is as long as its parsing.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

LARGE_BYTES = 65536
MAX_PAUSE_S = 0.5


class LargeBodyLock:
    """The lock of one gateway."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._free_s = 0.0
        """End of the current pause."""

    @asynccontextmanager
    async def hold(self, num_bytes: int) -> AsyncIterator[None]:
        """Hold the lock while parsing a body of `num_bytes`. Small bodies never wait."""
        if num_bytes <= LARGE_BYTES:
            yield
            return
        async with self._lock:
            await asyncio.sleep(max(0.0, self._free_s - time.monotonic()))
            begin_s = time.monotonic()
            try:
                yield
            finally:
                end_s = time.monotonic()
                self._free_s = end_s + min(MAX_PAUSE_S, end_s - begin_s)
