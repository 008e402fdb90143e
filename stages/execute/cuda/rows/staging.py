"""Pinned slots for the words that each step sends to the GPU and for the result that returns.

    free ──fill──► sent ──event complete, result read──► free

A slot is reused only when the result of its step has been read: then the copy to the GPU is complete too. The last
kernel of a step writes the result to the slot in host memory, so that no copy lies between a step and the next one.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.kernels.step_inputs import IntArray
from pipeline.kernels.triton.step import HEADER, RUN_WORDS, STAMP_WORDS, Head, result_words, words_of
from pipeline.stages.execute.cuda.device import Device, StreamEvent
from pipeline.stages.execute.cuda.rows.batches import Batch

NUM_SLOTS = 8
"""More than the scheduler has steps in flight."""

Run = tuple[int, "np.ndarray[Any, np.dtype[np.int32]]"]
"""An offset in the rows' state, and the numbers to write there."""


_HEAD = slice(Head.NUM_TOKENS, Head.RUNS_AT + 1)
_TOKENS_AT, _RESULT_AT = int(Head.TOKENS_AT), int(Head.RESULT_AT)


RESULT_ALIGNMENT = 32
"""Words; 128 bytes, so that the results of two steps share no cache line."""


@dataclass(slots=True)
class Slot:
    """`words` [capacity] as kernels/triton/step.py has them, as tensor and as array."""

    words: Tensor
    words_array: IntArray
    result_at: int
    """Offset of its result in `Staging.results`."""
    result_array: IntArray
    """The result, as kernels/triton/step.py has it; complete when `done` is."""
    times: "np.ndarray[Any, np.dtype[np.int64]]"
    """Begin and end of the step, by the GPU's clock in nanoseconds; 0 if kernels are interpreted."""
    done: StreamEvent
    fixed: Tensor
    """The words that every step has."""


class Staging:
    """Owns the slots, and the words on the device. `results` are those of all slots, behind one that no slot has: the
    result of a step that is captured."""

    def __init__(self, device: Device, max_num_rows: int, max_num_tokens: int, max_num_samples: int) -> None:
        self._device, self._max_num_rows = device, max_num_rows
        self._fixed = words_of(max_num_rows, max_num_samples)
        # Room for the tokens of the largest step, and as much for changes. Further changes are sent before the step.
        self.capacity = 1 << (self._fixed + 2 * max_num_tokens + 4096 - 1).bit_length()
        self.words = torch.zeros(self.capacity, dtype=torch.int32, device=device.where)
        self._fixed_words = self.words[: self._fixed]
        self._result_words = -(-result_words(max_num_samples) // RESULT_ALIGNMENT) * RESULT_ALIGNMENT
        self.results = device.pinned((1 + NUM_SLOTS) * self._result_words, torch.int32)
        self._free = deque(self._slot(device, (1 + i) * self._result_words) for i in range(NUM_SLOTS))

    def _slot(self, device: Device, result_at: int) -> Slot:
        words = device.pinned(self.capacity, torch.int32)
        result = self.results.numpy()[result_at : result_at + self._result_words]
        times = result[:STAMP_WORDS].view(np.int64)
        return Slot(words, words.numpy(), result_at, result, times, device.event(), words[: self._fixed])

    @property
    def has_free(self) -> bool:
        """Whether two slots are free: one for a step, and one for changes that are sent before it."""
        return len(self._free) > 1

    def take(self) -> Slot:
        """A free slot, in use until `give`."""
        assert self._free, f"more than {NUM_SLOTS} steps are in flight"
        return self._free.popleft()

    def give(self, slot: Slot) -> None:
        """Free a slot whose result has been read."""
        self._free.append(slot)

    def room(self, batch: Batch) -> int:
        """Words left for changes beside a batch, including `RUN_WORDS` for each run."""
        return self.capacity - self._fixed - batch.num_tokens

    def fill(self, slot: Slot, batch: Batch, runs: list[Run], *, one_each: bool) -> None:
        """Write a step and copy it to the device. With `one_each` the tokens' entries are not written, as `prepare`
        does not read them."""
        words, most = slot.words_array, self._max_num_rows
        num, at = len(batch.rows), self._fixed
        words[_HEAD] = batch.num_tokens, num, len(batch.sampled), len(runs), at
        words[_RESULT_AT] = slot.result_at
        for i, array in enumerate((batch.rows, batch.starts, batch.counts, batch.offsets, batch.sampled)):
            begin = HEADER + i * most
            words[begin : begin + len(array)] = array
        if runs:
            at = self._write_runs(words, at, runs)
        if not one_each:
            words[_TOKENS_AT] = at
            words[at : at + batch.num_tokens] = np.repeat(np.arange(num, dtype=np.int32), batch.counts)
            at += batch.num_tokens
        self._copy(slot, at)

    def _write_runs(self, words: IntArray, at: int, runs: list[Run]) -> int:
        """Write runs from word `at` on. Returns their end."""
        table = words[at : at + RUN_WORDS * len(runs)].reshape(-1, RUN_WORDS)
        at += RUN_WORDS * len(runs)
        for i, (target, numbers) in enumerate(runs):
            table[i] = target, len(numbers), at
            words[at : at + len(numbers)] = numbers
            at += len(numbers)
        return at

    def _copy(self, slot: Slot, num: int) -> None:
        if num == self._fixed:
            self._device.copy(self._fixed_words, slot.fixed)
        else:
            self._device.copy(self.words[:num], slot.words[:num])


def num_words(runs: list[Run]) -> int:
    """Words of changes."""
    return sum(RUN_WORDS + len(numbers) for _, numbers in runs)


def split_runs(runs: list[Run], room: int) -> tuple[list[Run], list[Run]]:
    """The first runs, which take at most `room` words, and the others. The run at the boundary is cut in two."""
    taken: list[Run] = []
    for i, (target, numbers) in enumerate(runs):
        fits = room - RUN_WORDS
        if len(numbers) > fits:
            if fits <= 0:
                return taken, runs[i:]
            return [*taken, (target, numbers[:fits])], [(target + fits, numbers[fits:]), *runs[i + 1 :]]
        taken.append((target, numbers))
        room = fits - len(numbers)
    return taken, []
