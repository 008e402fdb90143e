"""Many requests of one call, from a thread that blocks: a bounded window of them is open, and results keep their order.

the caller's thread   reads prompts ─► keeps the window full ─► waits for a result ─► …
the loop's thread                        └─ a task for each request ─┘
"""

import asyncio
from collections.abc import Iterator
from queue import SimpleQueue
from typing import NamedTuple

from pipeline.client.async_llm import AsyncLLM
from pipeline.client.connection.loop_thread import LoopThread
from pipeline.client.inputs.prompts import CheckedPrompt
from pipeline.client.inputs.request_options import RequestOptions
from pipeline.client.inputs.sampling_params import SamplingParams
from pipeline.client.outputs import RequestOutput
from pipeline.client.progress import BatchBar
from pipeline.errors import PromptError


class BatchItem(NamedTuple):
    """One request of a batch."""

    ready: CheckedPrompt
    params: SamplingParams
    name: str
    """What errors call it, as `prompts[17]`."""
    options: RequestOptions = RequestOptions()


def run(
    thread: LoopThread, llm: AsyncLLM, items: Iterator[BatchItem], window: int, bar: BatchBar
) -> list[RequestOutput]:
    """The outputs of all items, in their order. At most `window` are open or waiting at once; items are read as there
    is room for them.

    Raises PromptError, which names the item, and ServerFailed. Whatever is raised, an interrupt included, all that is
    open has been aborted.
    """
    batch = _Batch(llm, bar)
    outputs: list[RequestOutput | None] = []
    names: dict[int, str] = {}
    """Of what is open."""
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
            place, result = batch.results.get()
            name = names.pop(place)
            if isinstance(result, PromptError):
                raise PromptError(f"{name}: {result}", place=place, status=result.status, code=result.code) from result
            if isinstance(result, BaseException):
                raise result
            outputs[place] = result
            bar.done()
    except BaseException:
        if not thread.is_closed:
            thread.run(batch.cancel())
        raise


class _Batch:
    """What is open, in the loop's thread."""

    def __init__(self, llm: AsyncLLM, bar: BatchBar) -> None:
        self.results: SimpleQueue[tuple[int, RequestOutput | BaseException]] = SimpleQueue()
        """By the item's place. Bounded by the window."""
        self._llm = llm
        self._bar = bar
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, place: int, item: BatchItem) -> None:
        task = asyncio.get_running_loop().create_task(self._one(place, item))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def cancel(self) -> None:
        """Abort all that is open."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, place: int, item: BatchItem) -> None:
        try:
            result: RequestOutput | BaseException
            result = await self._llm.complete(item.ready, item.params, self._bar.count, item.options)
        except BaseException as error:
            self.results.put((place, error))
            if isinstance(error, asyncio.CancelledError):
                raise
        else:
            self.results.put((place, result))
