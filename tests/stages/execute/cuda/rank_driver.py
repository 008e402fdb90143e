"""Several ranks on interpreted GPUs in one process, each in a thread. Only one of them runs at a time, because Triton's
interpreter is not for threads: a rank passes the turn on where it waits for others."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from pipeline.config.settings import Settings
from pipeline.runtime import messages as m
from pipeline.stages.execute.cuda.ranks.board import RankBoard
from pipeline.stages.execute.cuda.ranks.collectives import Collectives
from pipeline.stages.execute.cuda.ranks.device_ranks import join_by
from pipeline.stages.execute.cuda.runner import CudaRunner
from pipeline.stages.execute.publishing import Sampled
from pipeline.stages.execute.ranks.context import RankContext
from tests.stages.execute.driver import Driver

TIMEOUT_S = 60.0
T = TypeVar("T")


class Turns:
    """The right to run, and what the ranks exchange."""

    def __init__(self, num_ranks: int) -> None:
        self.lock = threading.Lock()
        self._barrier = threading.Barrier(num_ranks)
        self.sent: list[Tensor] = [torch.zeros(0)] * num_ranks
        self.num_operations = 0

    def meet(self) -> None:
        self.lock.release()
        try:
            self._barrier.wait(TIMEOUT_S)
        finally:
            self.lock.acquire()


class ThreadCollectives(Collectives):
    def __init__(self, board: RankBoard, turns: Turns) -> None:
        self._rank, self._turns = board.context.rank, turns

    def _exchange(self, own: Tensor) -> list[Tensor]:
        turns = self._turns
        turns.sent[self._rank] = own.clone()
        turns.num_operations += 1
        turns.meet()
        received = list(turns.sent)
        turns.meet()
        return received

    def all_gather(self, out: Tensor, own: Tensor) -> None:
        out.copy_(torch.stack(self._exchange(own)))

    def all_reduce(self, tensor: Tensor) -> None:
        first, *others = self._exchange(tensor)
        for other in others:
            first = first + other
        tensor.copy_(first)

    def broadcast(self, tensor: Tensor) -> None:
        tensor.copy_(self._exchange(tensor)[0])

    def close(self) -> None:
        pass


class TurnBoard(RankBoard):
    """Passes the turn on while it waits."""

    turns: Turns

    def _wait(self, *args: Any) -> Any:
        self.turns.lock.release()
        try:
            return super()._wait(*args)
        finally:
            self.turns.lock.acquire()


class RankRunners:
    """A `CudaRunner` to its users: every step goes to all ranks, and rank 0 answers."""

    def __init__(self, config: Settings, folder: Path, num_ranks: int, swap_bytes: int = 0) -> None:
        execute = msgspec.structs.replace(config.execute, tensor_parallel=num_ranks)
        config = msgspec.structs.replace(config, execute=execute)
        self.fd = os.memfd_create("ranks")
        self._threads = ThreadPoolExecutor(num_ranks)
        self.turns = turns = Turns(num_ranks)
        TurnBoard.turns = turns

        def load(rank: int) -> CudaRunner:
            swap = memoryview(bytearray(swap_bytes)) if swap_bytes else None
            context = RankContext(rank, num_ranks, self.fd, TIMEOUT_S)
            with turns.lock:
                join = join_by(context, lambda board, where: ThreadCollectives(board, turns))
                return CudaRunner(config, folder, swap, join=join)

        try:
            self.ranks = list(self._threads.map(load, range(num_ranks)))
        except BaseException:
            self._threads.shutdown()
            os.close(self.fd)
            raise
        self.facts, self.rows = self.ranks[0].facts, self.ranks[0].rows
        assert all(rank.facts == self.facts for rank in self.ranks)

    def on_all(self, work: Callable[[CudaRunner], T]) -> list[T]:
        def turn(rank: CudaRunner) -> T:
            with self.turns.lock:
                return work(rank)

        return list(self._threads.map(turn, self.ranks))

    def step(self, step: m.Step, take: Any) -> Sampled:
        sampled = self.on_all(lambda rank: rank.step(step, take))
        for other in sampled[1:]:
            assert (other.ids == sampled[0].ids).all() and (other.finishes == sampled[0].finishes).all()
        return sampled[0]

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self._threads.shutdown()
        os.close(self.fd)


class CudaRankDriver(Driver):
    """A driver of several ranks. The caller replaces `ranks.RankBoard` by `TurnBoard`."""

    runner: Any

    def __init__(self, folder: Path, config: Settings, num_ranks: int) -> None:
        self.runner = RankRunners(config, folder, num_ranks)
        self._budget = config.schedule.max_num_batched_tokens
        self.clear()

    def logits(self) -> np.ndarray:
        return self.runner.ranks[0].model.logits.numpy().copy()
