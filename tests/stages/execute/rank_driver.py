"""Several ranks in one process, each in a thread of its own: they wait for each other in native code, without GIL."""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pipeline.config.settings import Settings
from pipeline.runtime import messages as m
from pipeline.stages.execute.cpu.native.program import NativeProgram
from pipeline.stages.execute.cpu.runner import CpuRunner
from pipeline.stages.execute.publishing import Sampled
from pipeline.stages.execute.ranks.context import RankContext
from tests.stages.execute.driver import Driver, settings
from tests.stages.execute.native_driver import emulation

TIMEOUT_S = 60.0
T = TypeVar("T")


class RankRunners:
    """A `CpuRunner` to its users: every step goes to all ranks, and rank 0 answers."""

    def __init__(self, config: Settings, folder: Path, swap_bytes: int = 0, timeout_s: float = TIMEOUT_S) -> None:
        num_ranks, num_stages = config.execute.tensor_parallel, config.execute.pipeline_parallel
        self.fds = [os.memfd_create("ranks") for _ in range(num_stages + 1)]
        self._threads = ThreadPoolExecutor(num_ranks * num_stages)
        self._queues = [ThreadPoolExecutor(1) for _ in range(num_ranks * num_stages)]
        """Each rank computes its steps in order, beside the others."""

        def load(number: int) -> CpuRunner:
            swap = memoryview(bytearray(swap_bytes)) if swap_bytes else None
            stage, rank = divmod(number, num_ranks)
            context = RankContext(rank, num_ranks, self.fds[stage], timeout_s, stage, num_stages, self.fds[-1])
            return CpuRunner(config, folder, swap, context)

        self.ranks = list(self._threads.map(load, range(num_ranks * num_stages)))
        self._first = first = num_ranks * (num_stages - 1)
        """Of the last stage, which samples."""
        answering = self.ranks[first]
        assert isinstance(answering.program, NativeProgram)
        self.facts, self.rows = answering.facts, answering.rows
        self.program, self.masks = answering.program, answering.masks
        assert all(rank.facts == self.facts for rank in self.ranks)
        assert len({rank.weight_formats for rank in self.ranks}) == 1

    def on_all(self, work: Callable[[CpuRunner], T]) -> list[T]:
        return list(self._threads.map(work, self.ranks))

    def submit(self, step: m.Step, take: Any) -> list[Future[Sampled]]:
        """Send a step to all ranks, which may compute steps before it."""
        return [queue.submit(rank.step, step, take) for queue, rank in zip(self._queues, self.ranks, strict=True)]

    def answer(self, submitted: list[Future[Sampled]]) -> Sampled:
        """The result of a step, when the ranks of the last stage have computed it."""
        answer, *others = [future.result() for future in submitted[self._first :]]
        for other in others:
            assert (other.ids == answer.ids).all() and (other.finishes == answer.finishes).all()
        return answer

    def step(self, step: m.Step, take: Any) -> Sampled:
        answer = self.answer(submitted := self.submit(step, take))
        assert not any(len(future.result().ids) for future in submitted[: self._first])
        for rank in self.ranks[self._first + 1 :]:
            assert (rank.rows.num_ids == self.rows.num_ids).all()
            assert (rank.rows.ended == self.rows.ended).all()
        return answer

    def drop_rows(self) -> None:
        """Drop all rows, on all ranks."""
        for queue in self._queues:
            queue.submit(lambda: None).result()
        for rank in self.ranks:
            rank.drop_all(1)

    def keep_logits(self) -> None:
        for rank in self.ranks[self._first :]:
            rank.program.keep_logits()

    def close(self) -> None:
        for pool in (self._threads, *self._queues):
            pool.shutdown()  # a rank of an earlier stage may still be in a step whose result has come
        for rank in self.ranks:
            rank.close()
        for fd in self.fds:
            os.close(fd)


class RankDriver(Driver):
    """A driver of several ranks. `barrier_timeout_s` is the setting."""

    def __init__(
        self, folder: Path, isa: str, num_ranks: int = 1, *, num_stages: int = 1, swap_bytes: int = 0, **how: Any
    ) -> None:
        timeout_s, layers = how.pop("timeout_s", TIMEOUT_S), how.pop("layers", ())
        with emulation(isa) as kernels:
            config = settings(dtype="bfloat16", kernels=kernels, **{"threads": 1, "max_num_seqs": 16, **how})
            execute = msgspec.structs.replace(
                config.execute, tensor_parallel=num_ranks, pipeline_parallel=num_stages, pipeline_layers=layers
            )
            config = msgspec.structs.replace(config, execute=execute)
            self.ranks = RankRunners(config, folder, swap_bytes, timeout_s)
        self.runner = self.ranks  # type: ignore[assignment]
        self.ranks.keep_logits()
        self._budget = config.schedule.max_num_batched_tokens
        self.clear()
