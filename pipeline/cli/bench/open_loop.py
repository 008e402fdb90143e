"""The open loop: requests arrive at a rate, however long the server takes, beside streams that run all the time. The
package's docstring defines the window."""

import asyncio
from collections.abc import Awaitable, Callable
from math import inf
from time import perf_counter

import msgspec

from pipeline.cli.bench.arrivals import Arrivals
from pipeline.cli.bench.client import RequestResult
from pipeline.cli.bench.loop import Generate, Level
from pipeline.cli.bench.tally import Tally

Stream = Callable[[str, float, Tally, Callable[[], None]], Awaitable[RequestResult]]
"""(name of the request, fraction of the output length to request, its tally, what to call when its first text has
arrived) → its result"""
MAX_STREAM_ERRORS = 10
"""Failed requests in a row of one stream, after which it ends: a server that refuses everything would get requests
without end."""


class OpenLoopPlan(msgspec.Struct, frozen=True):
    """The extent of a level: the requests that arrive in `duration_s` seconds, or `num_requests` of them."""

    arrivals: Arrivals
    num_streams: int
    duration_s: float
    seed: str
    """Of the times of arrival."""
    num_requests: int | None = None
    num_warmups: int = 1
    """Requests before the streams begin, one after the other."""


class OpenLoop:
    """Runs one level. `run` may be awaited once."""

    def __init__(
        self,
        plan: OpenLoopPlan,
        generate: Generate,
        stream: Stream,
        new_tally: Callable[[], Tally],
        progress: Callable[["OpenLoop"], None],
        generate_warmup: Generate | None = None,
    ) -> None:
        """`generate` sends the requests that arrive, `stream` those of the running streams, each with a `new_tally`.
        `generate_warmup` sends those before; by default `generate` does."""
        self._plan = plan
        self._generate = generate
        self._generate_warmup = generate_warmup or generate
        self._stream = stream
        self._new_tally = new_tally
        self._progress = progress
        self._records: list[RequestResult] = []
        self._streams: list[RequestResult] = []
        self._num_starting = plan.num_streams
        self._running = asyncio.Event()
        self._opened_s = inf
        self._times_s: list[float] = []
        self._num_sent = 0

    @property
    def done(self) -> float:
        """The completed fraction of the level, 0 to 1."""
        if not self._running.is_set() or not self._times_s:
            return 0.0
        if self._plan.num_requests is not None:
            return self._num_sent / self._plan.num_requests
        return min(1.0, (perf_counter() - self._opened_s) / self._plan.duration_s)

    async def run(self) -> Level:
        """Warm up, start the streams, send the requests as they arrive, read them to their ends, stop the streams."""
        plan = self._plan
        for count in range(plan.num_warmups):
            self._records.append(await self._generate_warmup(f"warmup/{count}", 1.0))
        streams = [asyncio.create_task(self._run_stream(number)) for number in range(plan.num_streams)]
        try:
            if streams:
                await self._running.wait()
            self._running.set()
            self._opened_s = perf_counter()
            await self._send_all()
            closed_s = self._closed_s()
            await asyncio.sleep(max(0.0, closed_s - perf_counter()))
        finally:
            for task in streams:
                task.cancel()
            ends = await asyncio.gather(*streams, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end
        return Level(plan.num_streams, self._opened_s, closed_s, self._records, self._streams)

    def _closed_s(self) -> float:
        if self._plan.num_requests is None:
            return self._opened_s + self._plan.duration_s
        return max(record.ended_s for record in self._records)

    async def _send_all(self) -> None:
        plan, arrivals = self._plan, self._plan.arrivals
        self._times_s = arrivals.times_s(plan.seed, num_requests=plan.num_requests, duration_s=plan.duration_s)
        permits = asyncio.Semaphore(arrivals.max_concurrency or max(1, len(self._times_s)))
        async with asyncio.TaskGroup() as group:
            for number, time_s in enumerate(self._times_s):
                await asyncio.sleep(max(0.0, self._opened_s + time_s - perf_counter()))
                group.create_task(self._send(number, permits))

    async def _send(self, number: int, permits: asyncio.Semaphore) -> None:
        async with permits:
            self._num_sent += 1
            self._records.append(await self._generate(str(number), 1.0))
        self._progress(self)

    async def _run_stream(self, stream: int) -> None:
        """Send one request after the other until cancelled. The first ones have evenly spread lengths, from half to the
        whole, so that the streams don't end together."""
        part, num_failed, count = (1 + (stream + 1) / self._plan.num_streams) / 2, 0, 0
        while num_failed < MAX_STREAM_ERRORS:
            tally, sent_s = self._new_tally(), perf_counter()
            try:
                started = self._started if count == 0 else _nothing
                result = await self._stream(f"stream/{stream}/{count}", part, tally, started)
            except asyncio.CancelledError:
                self._streams.append(
                    RequestResult(sent_s, perf_counter(), tally.arrivals, 0, len(tally.arrivals), has_usage=False)
                )
                raise
            self._streams.append(result)
            num_failed = 0 if result.error is None else num_failed + 1
            part, count = 1.0, count + 1
            if count == 1 and not result.arrivals:
                self._started()
            self._progress(self)

    def _started(self) -> None:
        self._num_starting -= 1
        if self._num_starting == 0:
            self._running.set()


def _nothing() -> None:
    """A request after a stream's first one starts."""
