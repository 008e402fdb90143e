"""Time limits that count only the time in which this program ran: all processes may be suspended for minutes."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

TICK_S = 1.0
LONGEST_S = 3.0
"""A tick that takes longer was a suspension, which counts as this."""


@asynccontextmanager
async def patience(limit_s: float) -> AsyncIterator[asyncio.Timeout]:
    """As `asyncio.timeout(limit_s)`. Raises TimeoutError."""
    async with asyncio.timeout(None) as timeout:
        watcher = asyncio.create_task(_expire(timeout, limit_s))
        try:
            yield timeout
        finally:
            watcher.cancel()


async def _expire(limit: asyncio.Timeout, left_s: float) -> None:
    while left_s > 0:
        begun_s = time.monotonic()
        await asyncio.sleep(min(TICK_S, left_s))
        left_s -= min(time.monotonic() - begun_s, LONGEST_S)
    limit.reschedule(0.0)
