"""Threads for one kind of blocking work beside an event loop.

asyncio's default executor is one queue for everything: what blocks there, such as a read of a dead network share, stops
all other work, and the process can't end before it does. Each kind has a pool of its own instead, with a bound and a
name.
"""

import asyncio
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


SWITCH_S = 0.001
"""How long a loop waits for Python's lock (the GIL) while a thread has it; Python's default is 5 ms."""


def share_interpreter() -> None:
    """Let the loop of this process have Python's lock soon when pools' threads work. uvloop takes the lock for each
    callback, so with two threads the default would hold up a turn by 10 ms for each, and by 0.1 s now and then."""
    sys.setswitchinterval(SWITCH_S)


class PoolFull(Exception):
    """As much work waits as the pool takes."""


class WorkPool:
    """At most `max_threads` daemon threads, which are started when they are needed and do not keep the process alive.
    Any thread may call it."""

    def __init__(self, name: str, *, max_threads: int = 1, max_waiting: int | None = None) -> None:
        """`max_waiting`: work that may wait for a thread; None if something else bounds it."""
        self._name, self._max_threads, self._max_waiting = name, max_threads, max_waiting
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._num_idle = self._num_threads = 0
        self._changed = threading.Condition()

    @property
    def num_busy(self) -> int:
        """Threads that work, also for callers that have given up."""
        return self._num_threads - self._num_idle

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function in a thread. Raises PoolFull, or what the call raises. If this is cancelled, the call is
        dropped unless it has begun."""
        return await asyncio.wrap_future(self._submit(lambda: function(*args, **kwargs)))

    async def run_to_end(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """As `run`, but it returns only when the call has ended, also if this is cancelled: then the result
        is dropped, and what it raises is not logged."""
        task = asyncio.ensure_future(self.run(function, *args, **kwargs))
        try:
            return await asyncio.shield(task)
        finally:
            if not task.done():
                await asyncio.wait([task])
                if not task.cancelled():
                    task.exception()

    def _submit(self, call: Callable[[], T]) -> "Future[T]":
        future: Future[T] = Future()
        with self._changed:
            if self._max_waiting is not None:
                self._waiting = deque(one for one in self._waiting if not one[0].cancelled())
            has_thread = self._num_idle > len(self._waiting) or self._num_threads < self._max_threads
            if not has_thread and self._max_waiting is not None and len(self._waiting) >= self._max_waiting:
                raise PoolFull(f"{len(self._waiting)} wait already for {self._name}")
            self._waiting.append((future, call))
            if self._num_idle >= len(self._waiting) or self._num_threads == self._max_threads:
                self._changed.notify()
                return future
            self._num_threads += 1
        threading.Thread(target=self._work, name=f"{self._name}-{self._num_threads}", daemon=True).start()
        return future

    def _work(self) -> None:
        with self._changed:
            self._num_idle += 1
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                future, call = self._waiting.popleft()
                self._num_idle -= 1
            result: Any = None
            error: BaseException | None = None
            if is_wanted := future.set_running_or_notify_cancel():
                try:
                    result = call()
                except BaseException as raised:  # noqa: BLE001 - the caller gets it
                    error = raised
            # Before the caller knows: else its next call could find no idle thread, and start one.
            with self._changed:
                self._num_idle += 1
            if error is not None:
                future.set_exception(error)
            elif is_wanted:
                future.set_result(result)
            del future, call, result, error
