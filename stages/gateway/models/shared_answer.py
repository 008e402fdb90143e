"""One answer for all requests that come while it is made. Requests that need no key must not cost more if there are
more of them."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedAnswer(Generic[T]):
    """Makes one at a time. Requests that come meanwhile share the next one, so no answer is older than its request."""

    def __init__(self, make: Callable[[], Awaitable[T]]) -> None:
        self._make = make
        self._current: asyncio.Task[T] | None = None
        self._next: asyncio.Task[T] | None = None

    async def get(self) -> T:
        """Raises what `make` raises."""
        if self._next is None:
            self._next = asyncio.create_task(self._made_after(self._current))
        return await asyncio.shield(self._next)

    async def _made_after(self, previous: "asyncio.Task[T] | None") -> T:
        if previous is not None:
            await asyncio.wait([previous])
        self._current, self._next = self._next, None
        return await self._make()
