"""An event loop in a thread of its own, for blocking callers. It works even if the caller's thread runs a loop."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

JOIN_S = 5.0
MAX_WORKERS = 2


class LoopThread:
    """Starts at once; must be closed. Call it from any thread except its own."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        # Shutting down the loop's default executor starts a thread, which fails at the interpreter's exit.
        self._executor = ThreadPoolExecutor(MAX_WORKERS, thread_name_prefix=name)
        self._loop.set_default_executor(self._executor)
        # At exit, the interpreter joins non-daemon threads before it runs finalizers, so those would never stop this.
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        return self._loop.is_closed()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in this thread."""
        return threading.current_thread() is self._thread

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start a coroutine. Raises RuntimeError if the loop is closed."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and wait for it. An interrupt of the wait cancels it."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Schedule a call in the loop's thread."""
        self._loop.call_soon_threadsafe(function, *args)

    def close(self) -> None:
        """Cancel all tasks, and end the thread. May be called again."""
        if self._loop.is_closed():
            return
        self.run(_cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(JOIN_S)
        self._executor.shutdown(wait=False)
        self._loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
