"""Streams with log probabilities format them in turns that are fair to the API keys; without keys, to the addresses.

    output ──► is formatted ◄─ its turn ── waits, if MAX_TURN_S have been used in this turn of the loop ──► transport

Each stream formats only a part of what it has (MAX_ENTRIES_AT_ONCE). But a client may have hundreds of streams, read
none of them for a while, and then all at once: without turns, the loop would format a part of each before it looks at
anybody else's output.
"""

import asyncio
import itertools
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

from pipeline.runtime.queues.fair_queue import FairQueue
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest

T = TypeVar("T")

MAX_TURN_S = 0.01
"""After this much formatting, other streams with log probabilities wait for the next turn of the loop."""
NUM_PARTS = 2
"""Of streams that wait, in one turn of the loop: each takes 2 to 4 ms. The rest of MAX_TURN_S is for those that keep
up."""

_of_loops: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, PartTurns]" = weakref.WeakKeyDictionary()


class PartTurns:
    """The turns of all streams of one loop, those of several models too."""

    def __init__(self) -> None:
        self._queue: FairQueue[int, asyncio.Future[None]] = FairQueue()
        self._numbers = itertools.count()
        self._used_s = 0.0
        """In this turn of the loop."""
        self._is_due = False

    @staticmethod
    def of_loop() -> "PartTurns":
        """Those of the running loop."""
        loop = asyncio.get_running_loop()
        if (found := _of_loops.get(loop)) is None:
            found = _of_loops[loop] = PartTurns()
        return found

    @property
    def has_time(self) -> bool:
        """Whether a stream that keeps up may format its output in this turn of the loop."""
        return self._used_s < MAX_TURN_S

    def run(self, work: Callable[[], T]) -> T:
        """Format a part, which counts."""
        begin_s = time.perf_counter()
        try:
            return work()
        finally:
            self._used_s += time.perf_counter() - begin_s
            self._end_soon()

    async def take(self, scope: str) -> None:
        """Wait for the turn of a stream of this scope. It needs no deadline: some go on in each turn of the loop."""
        if self.has_time and not self._queue:
            return
        number, turn = next(self._numbers), asyncio.get_running_loop().create_future()
        self._queue.push(number, turn, scope, 1)
        self._end_soon()
        try:
            await turn
        finally:
            self._queue.remove(number)  # only if the client has left

    def _end_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._is_due, self._used_s = False, 0.0
        num_left = NUM_PARTS
        while num_left and (found := self._queue.pop()) is not None:
            _, turn, _ = found
            if not turn.done():
                turn.set_result(None)
                num_left -= 1
        if self._queue:
            self._end_soon()


class StreamTurns:
    """Those of one stream, which waits for none if it has no log probabilities."""

    def __init__(self, parsed: ParsedRequest, address: str = "") -> None:
        """`address` is the client's."""
        details = parsed.details
        has_logprobs = (details.num_top, details.prompt_num_top) != (None, None)
        self._turns = PartTurns.of_loop() if has_logprobs else None
        self._scope = parsed.scope or address

    @property
    def has_time(self) -> bool:
        """As `PartTurns`."""
        return self._turns is None or self._turns.has_time

    def run(self, work: Callable[[], T]) -> T:
        """As `PartTurns`."""
        return work() if self._turns is None else self._turns.run(work)

    async def take(self) -> None:
        """As `PartTurns`."""
        if self._turns is not None:
            await self._turns.take(self._scope)
