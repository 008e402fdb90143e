"""Large bodies take turns.

A body is parsed in one go, and while it is nobody else is served: 4 MiB of small values take 50 ms. Many that come
together would stand in one line before everybody else. So they are parsed one after the other, and between two of them
others have the loop for as long as the last one took.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

LARGE_BYTES = 65536
MAX_PAUSE_S = 0.5


class Turns:
    """Owns the turn of one gateway."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._free_s = 0.0
        """When the next may begin."""

    @asynccontextmanager
    async def turn(self, num_bytes: int) -> AsyncIterator[None]:
        """The time to work on a body of so many bytes. Small ones never wait."""
        if num_bytes <= LARGE_BYTES:
            yield
            return
        async with self._turn:
            await asyncio.sleep(max(0.0, self._free_s - time.monotonic()))
            begin_s = time.monotonic()
            try:
                yield
            finally:
                end_s = time.monotonic()
                self._free_s = end_s + min(MAX_PAUSE_S, end_s - begin_s)
