"""What the ranks on GPUs tell each other on the host: words in shared memory, a line for each rank, which it writes.

    step arrives ──► begin: all ranks have it ──► launch ──► … ──► collected

A rank launches a step only when all ranks have it. A collective operation in a step that one rank lacks would never
end on the others, and no process could stop it. A rank that others wait for longer than `execute.barrier_timeout_s` is
named.
"""

import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from pipeline.stages.execute.ranks.context import LOAD_TIMEOUT_S, TENSOR_PARALLEL, RankContext, RankLateError
from pipeline.stages.execute.ranks.shared_memory import Bytes, map_shared, pages_of
from pipeline.stages.execute.ranks.steps import StepNumbers

LINE_WORDS = 64
"""Of a rank: 512 bytes."""
STEP, ENDED, BEAT, BUSY, PROCESS, FILE, AGREED, VALUES = range(8)
"""Words of a line: the scheduler's incarnation << 32 | how many of its steps the rank has; steps that it has seen end,
ever; its clock (ns) when its loop last ran; whether it waits for another process, with a deadline of its own; its
process id and the descriptor of the store (`collectives.py`), 0 before; how many agreements it has come to; values."""
MAX_VALUES = 8

SPIN_S = 200e-6
"""A waiting rank yields for this long, and then sleeps between looks."""
SLEEP_S = 50e-6
SUSPENDED_S = 3.0
"""If more time is between two checks of the loop, which wakes every second, the process was suspended or busy."""
LONGEST_LOOK_S = 0.1
"""If more time is between two looks, the process was suspended. It does not count as waiting."""


class RankBoard:
    """Owned by the runner. Every wait has a deadline. Raises UserError if the shared memory can't be had."""

    def __init__(self, context: RankContext) -> None:
        self.context = context
        self._lines = self.allocate(0, context.num_ranks * LINE_WORDS * 8).view(np.int64).reshape(-1, LINE_WORDS)
        self._own = self._lines[context.rank]
        self._numbers = StepNumbers()
        self._timeout_s, self._is_loading = LOAD_TIMEOUT_S, True
        self._checked_s = self._excused_s = time.monotonic()
        self.waited_s = 0.0
        """How long this rank has waited for others before steps."""
        self.beat()

    def allocate(self, begin: int, num_bytes: int) -> Bytes:
        """Bytes of the memory that all ranks share, from a byte on: whole pages, zeros at first."""
        begin = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        return map_shared(self.context.fd, begin, pages_of(num_bytes), TENSOR_PARALLEL)[:num_bytes]

    @property
    def num_bytes(self) -> int:
        return int(self._lines.nbytes)

    def loaded(self) -> None:
        """From now on, the deadline is that of steps."""
        self._timeout_s, self._is_loading = self.context.timeout_s, False

    def beat(self) -> None:
        """This rank's loop runs."""
        self._own[BEAT] = time.monotonic_ns()

    def ended(self) -> None:
        """This rank has seen the end of a step."""
        self._own[ENDED] += 1

    def announce(self, incarnation: int) -> None:
        """A new scheduler has no steps yet: ranks that wait here with a step of the one before go on."""
        self._own[STEP] = self._numbers.announce(incarnation)

    def begin(self, incarnation: int, step_id: int) -> bool:
        """Wait until all ranks have this step. Returns False if its scheduler has died, and not all may have got it.
        Raises RankLateError."""
        self._own[STEP] = step = self._numbers.begin(incarnation, step_id)
        began_s = time.monotonic()
        for rank in self._others():
            seen = self._wait(lambda: int(self._lines[rank, STEP]), lambda seen: seen >= step, rank)  # noqa: B023
            if seen >> 32 > incarnation:
                return False
        self.waited_s += time.monotonic() - began_s
        return True

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Wait for the end of something that all ranks do together, such as the oldest step in flight. Raises
        RankLateError."""
        self._wait(is_over, bool, None)

    def check(self, waiting_s: float) -> None:
        """Raise RankLateError if this rank has waited for too long for a step in flight."""
        now_s = time.monotonic()
        if now_s - self._checked_s > SUSPENDED_S or self._is_excused(None):
            self._excused_s = now_s
        self._checked_s = now_s
        if min(waiting_s, now_s - self._excused_s) > self._timeout_s:
            raise self.late_error(None)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """While this rank waits for another process, with a deadline of its own, no rank calls it late."""
        self._own[BUSY] = 1
        try:
            yield
        finally:
            self._own[BUSY] = 0

    def agree(self, values: Sequence[int]) -> list[int]:
        """The smallest of each of these values over all ranks, which all call this in the same order."""
        assert len(values) <= MAX_VALUES
        agreed = int(self._own[AGREED]) + 1
        at = VALUES + agreed % 2 * MAX_VALUES  # others may still read the values of the agreement before
        self._own[at : at + len(values)] = values
        self._own[AGREED] = agreed
        for rank in self._others():
            self._wait(lambda: int(self._lines[rank, AGREED]), lambda seen: seen >= agreed, rank)  # noqa: B023
        return [int(value) for value in self._lines[:, at : at + len(values)].min(0)]

    def publish_file(self, fd: int) -> None:
        """Rank 0: the others may open this file."""
        self._own[FILE] = fd
        self._own[PROCESS] = os.getpid()

    def open_file(self) -> int:
        """The other ranks: a descriptor of their own of rank 0's file."""
        process = self._wait(lambda: int(self._lines[0, PROCESS]), bool, 0)
        return os.open(f"/proc/{process}/fd/{int(self._lines[0, FILE])}", os.O_RDWR | os.O_CLOEXEC)

    def late_error(self, rank: int | None) -> RankLateError:
        """Names the rank that was missed. Without one, a step in flight did not end: that is the rank whose loop does
        not run any more, or which has begun fewer steps; else all of them."""
        if self._is_loading:
            who = "one of the ranks" if rank is None else f"execute.{rank}"
            return RankLateError(f"{who} has not loaded its part of the model within {self._timeout_s:g} s")
        if rank is not None:
            return self._stood(f"execute.{rank}", "at the end of the step before")
        beats, steps = self._lines[:, BEAT], self._lines[:, STEP]
        silent_s = (time.monotonic_ns() - int(beats.min())) / 1e9
        if int(steps.min()) < int(steps.max()):
            return self._stood(f"execute.{int(steps.argmin())}", "before a step that others have begun")
        if silent_s > self.context.timeout_s / 2 and int(beats.argmin()) != self.context.rank:
            return self._stood(f"execute.{int(beats.argmin())}", "in a step in flight")
        return self._stood("the GPUs of all ranks", "in a step in flight")

    def _stood(self, who: str, where: str) -> RankLateError:
        return self.context.late_error(who, where, self._numbers.step_id)

    def _others(self) -> Iterator[int]:
        return (rank for rank in range(self.context.num_ranks) if rank != self.context.rank)

    def _is_excused(self, rank: int | None) -> bool:
        """Whether the rank, or without one any other, waits for another process."""
        busy = self._lines[:, BUSY]
        return bool(busy.any() if rank is None else busy[rank])

    def _wait(self, look: Callable[[], Any], is_enough: Callable[[Any], bool], rank: int | None) -> Any:
        """Look until it is enough. Returns what was seen. Raises RankLateError if that takes too long."""
        waited_s, before_s = 0.0, time.monotonic()
        while not is_enough(seen := look()):
            time.sleep(0 if waited_s < SPIN_S else SLEEP_S)
            now_s = time.monotonic()
            self.beat()
            if not self._is_excused(rank):
                waited_s += min(now_s - before_s, LONGEST_LOOK_S)
            before_s = now_s
            if waited_s > self._timeout_s:
                raise self.late_error(rank)
        return seen
