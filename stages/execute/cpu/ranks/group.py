"""A group of ranks as one of them sees it: the memory that they share, and their barriers (kernels/cpu/ranks.h).

    begin ──all ranks have the step──► program, with barriers ──► rank 0 publishes the ids ──► the others read them

A rank that others wait for longer than `execute.barrier_timeout_s` is named by the error of the ranks that wait.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import numpy as np

from pipeline.kernels.cpu import native
from pipeline.kernels.step_inputs import IntArray
from pipeline.stages.execute.ranks.context import LOAD_TIMEOUT_S, TENSOR_PARALLEL, RankContext, RankLateError
from pipeline.stages.execute.ranks.share import Share
from pipeline.stages.execute.ranks.shared_memory import map_shared, pages_of
from pipeline.stages.execute.ranks.steps import StepNumbers


class Begun(IntEnum):
    """`Ranks::Begun` in ranks.h."""

    ALL = 0
    ABANDONED = 1
    LATE = 2


class Outcome(IntEnum):
    """What rank 0 publishes at the end of a step."""

    DONE = 0
    """The ids are in the shared memory."""
    AGAIN = 1
    """The program samples again: grammar masks were late."""


class RankGroup:
    """Owned by the runner. All ranks allocate the same memory in the same order."""

    def __init__(self, library: ctypes.CDLL, context: RankContext, share: Share) -> None:
        """Raises UserError if the shared memory can't be had."""
        self.context, self.share = context, share
        self._library = library
        self._end = 0
        self._kept: list[Any] = []
        header = self.allocate(library.ranks_bytes(context.num_ranks))
        self.handle = library.ranks_new(header.ctypes.data, context.rank, context.num_ranks, native.SPINS, 0)
        self._set_timeout(LOAD_TIMEOUT_S)
        self.ids: IntArray | None = None
        """The ids that a step sampled, in shared memory."""
        self._numbers = StepNumbers()

    @property
    def rank(self) -> int:
        return self.context.rank

    def allocate(self, num_bytes: int) -> native.ByteArray:
        """Shared memory, zeros at first, that lives until `close`. Raises UserError if there is too little."""
        size = pages_of(num_bytes)
        array = map_shared(self.context.fd, self._end, size, TENSOR_PARALLEL, populate=True)
        self._end += size
        self._kept.append(array)
        return array

    def allocate_ids(self, num: int) -> IntArray:
        """Memory for a step's ids, which rank 0 writes."""
        ids: IntArray = self.allocate(4 * num)[: 4 * num].view(np.int32)
        self.ids = ids
        return ids

    def finish_loading(self) -> None:
        """Wait until all ranks have loaded their weights: steps may come as soon as one of them has. From then on,
        barriers have the deadline of the settings. Raises RankLateError."""
        if self._library.ranks_begin(self.handle, 1) == Begun.LATE:
            raise self.late_error()
        self._set_timeout(self.context.timeout_s)

    def _set_timeout(self, seconds: float) -> None:
        self._library.ranks_set_timeout(self.handle, int(seconds * 1000))

    def announce(self, incarnation: int) -> None:
        """A new scheduler has no steps yet: ranks that wait here with a step of the one before go on."""
        self._library.ranks_announce(self.handle, self._numbers.announce(incarnation))

    def begin(self, incarnation: int, step_id: int) -> bool:
        """Wait until all ranks have this step. Returns False if its scheduler has died, and not all may have got it.
        Raises RankLateError."""
        begun = self._library.ranks_begin(self.handle, self._numbers.begin(incarnation, step_id))
        if begun == Begun.LATE:
            raise self.late_error()
        return bool(begun == Begun.ALL)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """While this rank waits for another process, with a deadline of its own, no rank calls it late."""
        self._library.ranks_set_busy(self.handle, 1)
        try:
            yield
        finally:
            self._library.ranks_set_busy(self.handle, 0)

    def publish(self, outcome: Outcome) -> None:
        """Rank 0: the others may read the ids, or must sample again."""
        self._library.ranks_publish(self.handle, int(outcome))

    def await_outcome(self) -> Outcome:
        """The other ranks: wait for rank 0. Raises RankLateError."""
        outcome = self._library.ranks_await_outcome(self.handle)
        if outcome < 0:
            raise self.late_error()
        return Outcome(outcome)

    def late_error(self) -> RankLateError:
        """Names the rank that was missed last."""
        rank, layer = ctypes.c_int(), ctypes.c_int()
        at = self._library.ranks_late(self.handle, ctypes.byref(rank), ctypes.byref(layer)).decode()
        where = f"{at}, layer {layer.value}" if layer.value >= 0 else at
        number = self.context.first_of(self.context.stage) + rank.value
        return self.context.late_error(f"execute.{number}", f"at {where}", self._numbers.step_id)

    def waited_s(self) -> float:
        """How long this rank has waited for others."""
        return float(self._library.ranks_waited_s(self.handle, self.context.rank))

    def close(self) -> None:
        if self.handle:
            self._library.ranks_delete(self.handle)
            self.handle = None
            self.ids = None
            self._kept.clear()
