"""An event loop in a thread of its own, for programs that block. Whether one runs in the caller's thread makes no
difference."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

JOIN_S = 5.0
MAX_WORKERS = 2


class LoopThread:
    """Started at once, and to be closed. Usable from any thread but its own."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        # The loop's own executor needs a new thread to end, and there is none to be had when the interpreter ends.
        self._executor = ThreadPoolExecutor(MAX_WORKERS, thread_name_prefix=name)
        self._loop.set_default_executor(self._executor)
        # A daemon: threads that aren't are waited for before anything is closed at exit.
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        return self._loop.is_closed()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in it."""
        return threading.current_thread() is self._thread

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Begin something. Raises RuntimeError where the loop is closed."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something and wait for it, which whatever interrupts the wait cancels."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Call something in the loop's thread, soon."""
        self._loop.call_soon_threadsafe(function, *args)

    def close(self) -> None:
        """Cancel what is left, and end the thread. May be called again."""
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
