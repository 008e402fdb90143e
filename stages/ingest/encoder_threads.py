"""Threads that encode long prompts, shared fairly by the API keys whose prompts wait.

    run() ──► FairGate ──► a thread, at most one of each scope ──► the result, in the loop
    run_alone() ──────────►

An encoding that has begun can't be interrupted, and one of megabytes takes seconds. So a scope has at most one thread,
whatever it sends, and the others are there for the other scopes. Longer prompts have other threads than shorter ones.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pipeline.runtime.process.black_box import Breadcrumb
from pipeline.runtime.queues.fair_gate import FairGate

T = TypeVar("T")


class EncoderThreads:
    """Some threads and their queue. Belongs to the loop in which it was created."""

    def __init__(self, name: str, breadcrumbs: Sequence[Breadcrumb]) -> None:
        """As many threads as there are `breadcrumbs`; each has one of its own."""
        self._unowned = list(breadcrumbs)
        self._of_thread = threading.local()
        self._threads = ThreadPoolExecutor(len(breadcrumbs), name, self._begin_thread)
        self._gate = FairGate(len(breadcrumbs), num_per_scope=1)
        self._loop = asyncio.get_running_loop()
        self._num_alone = 0
        self.on_done: Callable[[], None] = lambda: None
        """Called in the loop when a thread is free again."""

    @property
    def num_running(self) -> int:
        """Calls that have begun and not ended, also those whose result is dropped."""
        return self._gate.num_inside + self._num_alone

    async def run(self, scope: str, cost: int, work: Callable[[Breadcrumb], T]) -> T:
        """Call `work` in a thread when it is its scope's turn. If this is cancelled before, it is never called; later,
        its result is dropped. Each prompt before takes a bounded time, and the gateway's limits bound their number."""
        await self._gate.enter(scope, cost)
        return await self._run(work, lambda: self._gate.leave(scope))

    async def run_alone(self, work: Callable[[Breadcrumb], T]) -> T:
        """Call `work` in a thread without a turn. The caller sees to it that nothing else is running."""
        self._num_alone += 1
        return await self._run(work, self._leave_alone)

    def _leave_alone(self) -> None:
        self._num_alone -= 1

    async def _run(self, work: Callable[[Breadcrumb], T], leave: Callable[[], None]) -> T:
        future = self._threads.submit(self._work, work)
        future.add_done_callback(lambda _: self._done(leave))
        return await asyncio.wrap_future(future)

    def hold(self, is_held: bool) -> None:
        """Whether nothing is begun of what waits for its turn."""
        self._gate.hold(is_held)

    def close(self) -> None:
        """Begin nothing more."""
        self._gate.close()

    def join(self) -> None:
        """Wait for the work that has begun."""
        self.close()
        self._threads.shutdown()

    def _done(self, leave: Callable[[], None]) -> None:
        """In any thread."""
        with contextlib.suppress(RuntimeError):  # the loop was closed
            self._loop.call_soon_threadsafe(self._ended, leave)

    def _ended(self, leave: Callable[[], None]) -> None:
        leave()
        self.on_done()

    # ------------------------------------------------------------------------------------------------ in the threads

    def _begin_thread(self) -> None:
        self._of_thread.breadcrumb = self._unowned.pop()

    def _work(self, work: Callable[[Breadcrumb], T]) -> T:
        return work(self._of_thread.breadcrumb)
