"""Several ranks in one process, each in a thread of its own: they wait for each other in native code, without GIL."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pipeline.config.settings import Settings
from pipeline.runtime import messages as m
from pipeline.stages.execute.cpu.native_program import NativeProgram
from pipeline.stages.execute.cpu.rank_group import RankPlace
from pipeline.stages.execute.cpu.runner import CpuRunner
from pipeline.stages.execute.runner import Sampled
from tests.stages.execute.driver import Driver, settings
from tests.stages.execute.native_driver import emulation

TIMEOUT_S = 60.0
T = TypeVar("T")


class RankRunners:
    """A `CpuRunner` to its users: every step goes to all ranks, and rank 0 answers."""

    def __init__(
        self, config: Settings, folder: Path, num_ranks: int, swap_bytes: int = 0, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.fd = os.memfd_create("ranks")
        self._threads = ThreadPoolExecutor(num_ranks)

        def load(rank: int) -> CpuRunner:
            swap = memoryview(bytearray(swap_bytes)) if swap_bytes else None
            return CpuRunner(config, folder, swap, RankPlace(rank, num_ranks, self.fd, timeout_s))

        self.ranks = list(self._threads.map(load, range(num_ranks)))
        first = self.ranks[0]
        assert isinstance(first.program, NativeProgram)
        self.facts, self.rows, self.program, self.masks = first.facts, first.rows, first.program, first.masks
        assert all(rank.facts == self.facts for rank in self.ranks)

    def on_all(self, work: Callable[[CpuRunner], T]) -> list[T]:
        return list(self._threads.map(work, self.ranks))

    def step(self, step: m.Step, take: Any) -> Sampled:
        sampled = self.on_all(lambda rank: rank.step(step, take))
        for rank in self.ranks[1:]:
            assert (rank.rows.num_ids == self.rows.num_ids).all()
            assert (rank.rows.ended == self.rows.ended).all()
        for other in sampled[1:]:
            assert (other.ids == sampled[0].ids).all() and (other.finishes == sampled[0].finishes).all()
        return sampled[0]

    def keep_logits(self) -> None:
        for rank in self.ranks:
            rank.program.keep_logits()

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self._threads.shutdown()
        os.close(self.fd)


class RankDriver(Driver):
    """A driver of several ranks. `barrier_timeout_s` is the setting."""

    def __init__(self, folder: Path, isa: str, num_ranks: int, *, swap_bytes: int = 0, **how: Any) -> None:
        timeout_s = how.pop("timeout_s", TIMEOUT_S)
        with emulation(isa) as kernels:
            config = settings(dtype="bfloat16", kernels=kernels, **{"threads": 1, "max_num_seqs": 16, **how})
            execute = msgspec.structs.replace(config.execute, tensor_parallel=num_ranks)
            config = msgspec.structs.replace(config, execute=execute)
            self.ranks = RankRunners(config, folder, num_ranks, swap_bytes, timeout_s)
        self.runner = self.ranks  # type: ignore[assignment]
        self.ranks.keep_logits()
        self._budget = config.schedule.max_num_batched_tokens
        self.clear()
