"""The closed loop: each stream has one request in flight at any time. The package's docstring defines the window."""

import asyncio
from collections.abc import Awaitable, Callable
from time import perf_counter

import msgspec

from pipeline.cli.bench.client import RequestResult

Generate = Callable[[str, float], Awaitable[RequestResult]]
"""(name of the request, fraction of the output length to request) → its result"""


class LoadPlan(msgspec.Struct, frozen=True):
    """The extent of a level: `num_requests` requests, or `duration_s` seconds if that is None."""

    concurrency: int
    duration_s: float
    num_requests: int | None = None
    num_warmups: int = 1
    """Warm-up requests of each stream."""


class Level(msgspec.Struct):
    """The results of one level. The window is [opened_s, closed_s)."""

    concurrency: int
    opened_s: float
    closed_s: float
    records: list[RequestResult]
    streams: list[RequestResult] = []
    """Of streams that ran beside the requests that arrived (open_loop.py)."""


class ClosedLoop:
    """Runs one level. `run` may be awaited once."""

    def __init__(
        self,
        plan: LoadPlan,
        generate: Generate,
        progress: Callable[["ClosedLoop"], None],
        generate_warmup: Generate | None = None,
    ) -> None:
        """`generate_warmup` sends the warm-up requests; by default `generate` does."""
        self._plan = plan
        self._generate = generate
        self._generate_warmup = generate_warmup or generate
        self._progress = progress
        self._records: list[RequestResult] = []
        self._num_warming = plan.concurrency
        self._warm = asyncio.Event()
        self._opened_s = float("inf")
        self._num_started = 0
        self.num_errors = 0

    @property
    def done(self) -> float:
        """The completed fraction of the level, 0 to 1."""
        if not self._warm.is_set():
            return 0.0
        if self._plan.num_requests is not None:
            return min(1.0, self._num_started / self._plan.num_requests)
        return min(1.0, (perf_counter() - self._opened_s) / self._plan.duration_s)

    async def run(self) -> Level:
        async with asyncio.TaskGroup() as group:
            for stream in range(self._plan.concurrency):
                group.create_task(self._stream(stream))
        if self._plan.num_requests is None:
            closed_s = self._opened_s + self._plan.duration_s
        else:
            closed_s = max(record.ended_s for record in self._records)
        return Level(self._plan.concurrency, self._opened_s, closed_s, self._records)

    async def _stream(self, stream: int) -> None:
        for count in range(self._plan.num_warmups):
            await self._request(self._generate_warmup, f"warmup/{stream}/{count}", self._part(stream, count))
        self._warmed_up()
        if self._plan.num_requests is not None:
            await self._warm.wait()  # the warm-up requests of the other streams have deadlines
        while self._may_start():
            number = self._num_started
            self._num_started += 1
            await self._request(self._generate, str(number), 1.0)

    def _part(self, stream: int, count: int) -> float:
        """The fraction of the output length that a warm-up requests: the last ones end evenly spread over one request's
        time."""
        is_last = count == self._plan.num_warmups - 1
        return (stream + 1) / self._plan.concurrency if is_last and self._plan.num_requests is None else 1.0

    def _warmed_up(self) -> None:
        self._num_warming -= 1
        if self._num_warming == 0:
            self._opened_s = perf_counter()
            self._warm.set()

    def _may_start(self) -> bool:
        if self.num_errors >= max(10, 2 * self._plan.concurrency):
            return False  # a server that refuses everything would get requests without end
        if self._plan.num_requests is not None:
            return self._num_started < self._plan.num_requests
        return perf_counter() < self._opened_s + self._plan.duration_s

    async def _request(self, generate: Generate, name: str, part: float) -> None:
        record = await generate(name, part)
        self._records.append(record)
        self.num_errors += record.error is not None
        self._progress(self)
