"""The memory between the stages of a pipeline, as one of its ranks sees it (kernels/cpu/step_board.h).

    board      how many steps each rank has done
    drawn      ids of the last steps, from rank 0 of the last stage to all ranks of the others
    hidden     hidden states, from rank 0 of each stage to all ranks of the next one

A rank first writes what it hands over, then shows the step as done. Slots are used in turn; a writer waits until no
rank reads what was there. Steps are counted from each scheduler's first one: if a scheduler dies between two sends,
only some ranks have its last step, and abandon it when they see that others have learned of its successor.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from pipeline.kernels.cpu import native
from pipeline.kernels.sampling.logprob_inputs import FloatArray
from pipeline.kernels.step_inputs import IntArray
from pipeline.stages.execute.ranks.context import (
    LOAD_TIMEOUT_S,
    PIPELINE_PARALLEL,
    RankContext,
    RankLateError,
    StepAbandonedError,
)
from pipeline.stages.execute.ranks.shared_memory import map_shared
from pipeline.stages.execute.ranks.steps import StepNumbers

LINE = 64
HIDDEN_HEADER = np.dtype([("step", "<u8"), ("num_tokens", "<i8"), ("seconds", "<f8")])
DRAWN_HEADER = np.dtype([("step", "<u8"), ("num_ids", "<i8")])

LOADED = 2**32 - 1
"""As steps done before the first scheduler's."""

PATIENCE = 1.5
"""Stages wait this much longer than the ranks within a stage, which name the one that stands still."""


class PPLink:
    """Owned by the runner. All ranks lay out the same memory."""

    def __init__(
        self, library: ctypes.CDLL, context: RankContext, max_num_tokens: int, hidden_size: int, max_num_ids: int
    ) -> None:
        """Steps have at most `max_num_tokens` tokens, and sample at most `max_num_ids` ids. Raises UserError if the
        shared memory can't be had."""
        self._context, self._library = context, library
        self._num_slots = context.num_stages
        num_drawn = 2 * context.num_stages
        slot = _rounded(HIDDEN_HEADER.itemsize + 4 * max_num_tokens * hidden_size)
        drawn = _rounded(DRAWN_HEADER.itemsize + 4 * max_num_ids)
        board = _rounded(library.board_bytes(context.num_stages * context.num_ranks))
        begin_hidden = board + num_drawn * drawn
        memory = map_shared(
            context.link_fd, 0, begin_hidden + (context.num_stages - 1) * self._num_slots * slot, PIPELINE_PARALLEL
        )
        self._memory = memory
        self._handle = library.board_new(memory.ctypes.data, context.number, native.SPINS, 0)
        self._drawn = [memory[begin : begin + drawn] for begin in range(board, begin_hidden, drawn)]

        def hidden_after(stage: int) -> list[native.ByteArray]:
            first = begin_hidden + stage * self._num_slots * slot
            return [memory[first + i * slot : first + (i + 1) * slot] for i in range(self._num_slots)]

        self._in = hidden_after(context.stage - 1) if context.stage else []
        self._out = [] if context.is_last_stage else hidden_after(context.stage)
        self._hidden_size = hidden_size
        self._numbers = StepNumbers()
        self._set_timeout(LOAD_TIMEOUT_S)

    def use(self, program: int) -> None:
        """Let a program show which op it computes."""
        self._library.program_use_board(program, self._handle)

    def finish_loading(self) -> None:
        """Wait until all ranks of all stages have loaded their weights: steps may come as soon as one of them has. From
        then on, waits have the deadline of the settings. Raises RankLateError."""
        self._library.board_post(self._handle, LOADED)
        for rank in range(self._context.num_ranks * self._context.num_stages):
            if not self._library.board_wait(self._handle, rank, LOADED):
                raise self._late_error(rank)
        self._set_timeout(self._context.timeout_s * (PATIENCE if self._context.num_ranks > 1 else 1.0))

    def _set_timeout(self, seconds: float) -> None:
        self._library.board_set_timeout(self._handle, int(seconds * 1000))

    def announce(self, incarnation: int) -> None:
        """A new scheduler has no steps yet: ranks that wait here for a step of the one before abandon it."""
        self._library.board_post(self._handle, self._numbers.announce(incarnation))

    def begin(self, incarnation: int, step_id: int) -> None:
        """The next step."""
        if incarnation != self._numbers.incarnation:
            self.announce(incarnation)
        self._numbers.begin(incarnation, step_id)

    @property
    def number(self) -> int:
        """The step, counted from the present scheduler's first one."""
        return self._numbers.number

    def end(self) -> None:
        """What the step hands over is written, and what it reads is no longer needed."""
        self._library.board_post(self._handle, self._numbers.word_of(self.number))

    def receive(self, into: FloatArray, *, copies: bool) -> float:
        """Wait for the hidden states of the step, [tokens, hidden_size], and copy them if this rank `copies`. Returns
        the seconds that the stages before took for it. Raises RankLateError and StepAbandonedError."""
        slot = self._in[self.number % self._num_slots]
        header = slot[: HIDDEN_HEADER.itemsize].view(HIDDEN_HEADER)
        self._await(self._context.first_of(self._context.stage - 1), self.number)
        self._check(header)
        num_tokens = int(header["num_tokens"][0])
        assert num_tokens == len(into), f"the stage before has computed {num_tokens} tokens, not {len(into)}"
        if copies:
            into[:] = self._states(slot, num_tokens)
        return float(header["seconds"][0])

    def send(self, hidden: FloatArray, seconds: float) -> None:
        """Write the step's hidden states, [tokens, hidden_size], for the next stage. `seconds` are those that it has
        taken so far. Raises RankLateError."""
        self._await(self._context.first_of(self._context.stage + 1), self.number - self._num_slots)
        slot = self._out[self.number % self._num_slots]
        self._states(slot, len(hidden))[:] = hidden
        header = slot[: HIDDEN_HEADER.itemsize].view(HIDDEN_HEADER)
        header["num_tokens"], header["seconds"] = len(hidden), seconds
        header["step"] = self._numbers.word_of(self.number)

    def publish(self, ids: IntArray) -> None:
        """Rank 0 of the last stage: write the ids of the step for the stages before. Raises RankLateError."""
        for rank in range(self._context.first_of(self._context.stage)):
            self._await(rank, self.number - self._context.num_stages)
        slot = self._drawn[self.number % len(self._drawn)]
        header = slot[: DRAWN_HEADER.itemsize].view(DRAWN_HEADER)
        begin = DRAWN_HEADER.itemsize
        slot[begin : begin + 4 * len(ids)].view(np.int32)[:] = ids
        header["num_ids"], header["step"] = len(ids), self._numbers.word_of(self.number)

    def await_ids(self, number: int) -> IntArray:
        """The ids of a step, counted as `number`. Raises RankLateError and StepAbandonedError."""
        self._await(self._context.first_of(self._context.num_stages - 1), number)
        slot = self._drawn[number % len(self._drawn)]
        header = slot[: DRAWN_HEADER.itemsize].view(DRAWN_HEADER)
        self._check(header, number)
        begin, num_ids = DRAWN_HEADER.itemsize, int(header["num_ids"][0])
        ids: IntArray = slot[begin : begin + 4 * num_ids].view(np.int32).copy()
        return ids

    @contextmanager
    def busy(self) -> Iterator[None]:
        """While this rank waits for another process, with a deadline of its own, no rank calls it late."""
        self._library.board_set_busy(self._handle, 1)
        try:
            yield
        finally:
            self._library.board_set_busy(self._handle, 0)

    def waited_s(self) -> float:
        """How long this rank has waited for other stages."""
        return float(self._library.board_waited_s(self._handle)) if self._handle else 0.0

    def close(self) -> None:
        if self._handle:
            self._library.board_delete(self._handle)
            self._handle = None
            self._in, self._out, self._drawn = [], [], []

    def _await(self, rank: int, number: int) -> None:
        word = self._numbers.word_of(max(0, number))
        if word and not self._library.board_wait(self._handle, rank, word):
            raise self._late_error(rank)

    def _check(self, header: "np.ndarray[Any, Any]", number: int | None = None) -> None:
        """Raises StepAbandonedError if a slot has not what its writer should have written."""
        expected = self._numbers.word_of(self.number if number is None else number)
        found = int(header["step"][0])
        if found != expected:
            assert found < expected or found >> 32 > self._numbers.incarnation, f"step {found:x} overwrote {expected:x}"
            raise StepAbandonedError(f"step {self._numbers.step_id} of scheduler {self._numbers.incarnation}")

    def _states(self, slot: native.ByteArray, num_tokens: int) -> FloatArray:
        begin, width = HIDDEN_HEADER.itemsize, self._hidden_size
        states: FloatArray = slot[begin : begin + 4 * num_tokens * width].view(np.float32).reshape(num_tokens, width)
        return states

    def _late_error(self, rank: int) -> RankLateError:
        layer = self._library.board_layer(self._handle, rank)
        is_last = rank >= self._context.first_of(self._context.num_stages - 1)
        where = "the end of the step before" if layer < -1 else "the head" if is_last else "the embedding"
        where = f"layer {layer}" if layer >= 0 else where
        return self._context.late_error(f"execute.{rank}", f"at {where}", self._numbers.step_id)


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // LINE) * LINE
