"""Run a batch of requests from a blocking thread, with a bounded number of open ones. Results keep the prompts' order.

caller's thread   reads prompts ─► keeps the window full ─► waits for a result ─► …
loop's thread                        └─ a task for each request ─┘
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

from pipeline.client.async_llm import AsyncLLM
from pipeline.client.connection.loop_thread import LoopThread
from pipeline.client.progress import BatchBar
from pipeline.errors import PromptError

T = TypeVar("T")


class BatchItem(NamedTuple, Generic[T]):
    """One request of a batch."""

    name: str
    """Its name in error messages, such as `prompts[17]`."""
    result: Callable[[AsyncLLM, Callable[[int, int], None]], Coroutine[Any, Any, T]]
    """Runs it to its end. Its second argument is called with the numbers of new prompt ids and output ids."""


def run(thread: LoopThread, llm: AsyncLLM, items: Iterator[BatchItem[T]], window: int, bar: BatchBar) -> list[T]:
    """Returns the outputs of all items, in order. At most `window` requests are open or waiting at once; further items
    are read when one ends.

    Raises PromptError, which names the item, or ServerFailed. After any exception, including an interrupt, all open
    requests have been aborted.
    """
    batch: _Batch[T] = _Batch(llm, bar)
    outputs: list[T | None] = []
    names: dict[int, str] = {}
    """Names of the open items, by place."""
    try:
        is_read = False
        while True:
            while not is_read and len(names) < window:
                item = next(items, None)
                if item is None:
                    is_read = True
                    bar.all_read(len(outputs))
                else:
                    names[len(outputs)] = item.name
                    thread.call(batch.start, len(outputs), item)
                    outputs.append(None)
            if not names:
                return [output for output in outputs if output is not None]
            index, result = batch.results.get()
            name = names.pop(index)
            if isinstance(result, PromptError):
                raise PromptError(f"{name}: {result}", index=index, status=result.status, code=result.code) from result
            if isinstance(result, BaseException):
                raise result
            outputs[index] = result
            bar.done()
    except BaseException:
        if not thread.is_closed:
            thread.run(batch.cancel())
        raise


class _Batch(Generic[T]):
    """The open requests, in the loop's thread."""

    def __init__(self, llm: AsyncLLM, bar: BatchBar) -> None:
        self.results: SimpleQueue[tuple[int, T | BaseException]] = SimpleQueue()
        """(place of the item, result). The window bounds its size."""
        self._llm = llm
        self._bar = bar
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, index: int, item: BatchItem[T]) -> None:
        task = asyncio.get_running_loop().create_task(self._one(index, item))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def cancel(self) -> None:
        """Abort all open requests."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, index: int, item: BatchItem[T]) -> None:
        try:
            result: T | BaseException = await item.result(self._llm, self._bar.count)
        except BaseException as error:
            self.results.put((index, error))
            if isinstance(error, asyncio.CancelledError):
                raise
        else:
            self.results.put((index, result))
