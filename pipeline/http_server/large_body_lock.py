"""Serializes the parsing of large bodies.

4 MiB of small values take 50 ms to decode, and up to half a second to check. A thread does that, so that the event loop
goes on, but both need Python's lock. Many large bodies in a row would delay all other requests. So they are parsed one
at a time, with a pause after each that is as long as its parsing. They wait in a queue that is fair to the API keys,
and small ones don't wait behind the large ones of the same key.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pipeline.runtime.fair_gate import FairGate

LARGE_BYTES = 65536
"""Bodies up to this size need no lock."""
MAX_PAUSE_S = 0.5


class LargeBodyLock:
    """The lock of one gateway."""

    def __init__(self) -> None:
        self._gate = FairGate(1, num_per_scope=1)

    @asynccontextmanager
    async def hold(self, num_bytes: int, scope: str = "") -> AsyncIterator[None]:
        """Hold the lock while parsing a body of `num_bytes`; `scope` is whose it is. The caller limits the time."""
        await self._gate.enter(scope, num_bytes)
        begin_s = time.monotonic()
        try:
            yield
        finally:
            pause_s = min(MAX_PAUSE_S, time.monotonic() - begin_s)
            asyncio.get_running_loop().call_later(pause_s, self._gate.leave, scope)
