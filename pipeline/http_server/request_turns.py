"""Requests begin in turns that are fair to the API keys; without keys, to the addresses.

    head ──► rules ──► begins ◄─ its turn ── waits, if NUM_REQUESTS have begun in this turn of the loop ──► route

Without that, a key that sends hundreds of small requests at once, each on a connection of its own, has all of them
parsed and opened before the loop looks at anybody else's.
"""

import asyncio
import contextvars
import itertools

from aiohttp import web

from pipeline.http_server.access.guard import Handle, current_scope
from pipeline.runtime.queues.fair_queue import FairQueue
from pipeline.runtime.security.client_address import client_address

NUM_REQUESTS = 32
"""Requests that begin in one turn of the loop: they take about 10 ms. Others don't wait if there are no more."""


_turns: "contextvars.ContextVar[RequestTurns | None]" = contextvars.ContextVar("request turns", default=None)
"""Those of the current request's listener."""


async def another_turn(request: web.BaseRequest) -> None:
    """Wait for a turn again: behind a wait that ends for many requests at once, such as that for the stats of all
    stages. The rest of each would run in the same turn of the loop."""
    if (turns := _turns.get()) is not None:
        await turns.take(request)


class RequestTurns:
    """The turns of one listener's requests. Belongs to one loop."""

    def __init__(self) -> None:
        self._queue: FairQueue[int, asyncio.Future[None]] = FairQueue()
        self._numbers = itertools.count()
        self._num_begun = 0
        """In this turn of the loop."""
        self._is_due = False

    def wrap(self, handle: Handle) -> Handle:
        """Wrap `handle`, inside of all rules, which find whose a request is."""

        async def in_turn(request: web.BaseRequest) -> web.StreamResponse:
            await self.take(request)
            _turns.set(self)
            return await handle(request)

        return in_turn

    async def take(self, request: web.BaseRequest) -> None:
        """Wait for the request's turn."""
        await self.take_of(current_scope() or client_address(request.transport))

    async def take_of(self, scope: str) -> None:
        """Wait for the turn of one of this scope."""
        if self._num_begun >= NUM_REQUESTS or self._queue:
            await self._wait(scope)
        else:
            self._begin()

    async def _wait(self, scope: str) -> None:
        """It needs no deadline: some begin in each turn of the loop."""
        number, turn = next(self._numbers), asyncio.get_running_loop().create_future()
        self._queue.push(number, turn, scope, 1)
        try:
            await turn
        finally:
            self._queue.remove(number)  # only if the client has left

    def _begin(self) -> None:
        self._num_begun += 1
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._is_due, self._num_begun = False, 0
        while self._num_begun < NUM_REQUESTS and (found := self._queue.pop()) is not None:
            _, turn, _ = found
            if not turn.done():
                turn.set_result(None)
                self._begin()
