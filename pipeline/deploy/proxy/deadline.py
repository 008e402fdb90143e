"""The end of a request's time, which all its attempts share."""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator

TIMED_PATHS = frozenset(
    {
        "/v1/chat/completions", "/v1/chat/completions/render", "/v1/completions", "/v1/completions/render",
        "/v1/responses", "/v1/embeddings", "/inference/v1/generate", "/invocations", "/pooling", "/classify",
        "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank",
    }
)  # fmt: skip
"""Routes whose bodies have `timeout_s`. Others ignore it."""


class DeadlinePassed(Exception):
    """The request's time has passed."""


class Deadline:
    """Counts from the arrival of a request."""

    def __init__(self, received_s: float, timeout_s: float | None, given_s: float = math.inf) -> None:
        """`received_s` is by time.monotonic(). `timeout_s` is what the request or the settings say; 0 or None is
        unlimited. `given_s` is what another ingress says."""
        limit_s = timeout_s or math.inf
        self.timeout_s = limit_s if limit_s < math.inf else given_s
        """For errors: what the client knows of."""
        self._end_s = received_s + min(limit_s, given_s)

    @property
    def left_s(self) -> float:
        """Infinite if there is no limit."""
        return self._end_s - time.monotonic()

    @contextlib.asynccontextmanager
    async def bound(self) -> AsyncIterator[None]:
        """What is awaited within ends with it. Raises DeadlinePassed."""
        left_s = self.left_s
        if left_s <= 0:
            raise DeadlinePassed
        try:
            async with asyncio.timeout(left_s if left_s < math.inf else None):
                yield
        except TimeoutError:
            if self.left_s > 0:
                raise
            raise DeadlinePassed from None
