"""Serializes the parsing of large bodies.

4 MiB of small values take 50 ms to decode, and up to half a second to check. A thread does that, so that the event loop
goes on, but both need Python's lock. Many large bodies in a row would delay all other requests. So they are parsed one
at a time, and after each the next of the same key waits for twice as long as it took. They wait in a queue that is fair
to the API keys, and small ones don't wait behind the large ones of the same key.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from pipeline.runtime.queues.fair_gate import FairGate

LARGE_BYTES = 65536
"""Bodies up to this size need no lock."""
NUM_SCOPES = 2
"""Keys whose bodies are being parsed, or that pause: the body of one key waits for that of another, but not for the
pause after it."""
PAUSE_PER_PARSING = 2.0
MAX_PAUSE_S = 0.5

T = TypeVar("T")


class Turn:
    """Of one body."""

    def __init__(self) -> None:
        self.took_s = 0.0

    def run(self, work: Callable[[], T]) -> T:
        """Call it, in any thread."""
        begin_s = time.monotonic()
        try:
            return work()
        finally:
            self.took_s = time.monotonic() - begin_s


class LargeBodyLock:
    """The lock of one gateway. Its holders share one thread."""

    def __init__(self) -> None:
        self._gate = FairGate(NUM_SCOPES, num_per_scope=1)

    @asynccontextmanager
    async def hold(self, num_bytes: int, scope: str = "") -> AsyncIterator[Turn]:
        """Hold the lock while parsing a body of `num_bytes`, with the turn's `run`; `scope` is whose it is. The caller
        limits the time."""
        await self._gate.enter(scope, num_bytes)
        turn = Turn()
        try:
            yield turn
        finally:
            pause_s = min(MAX_PAUSE_S, PAUSE_PER_PARSING * turn.took_s)
            asyncio.get_running_loop().call_later(pause_s, self._gate.leave, scope)
