"""What goes to the GPU and comes back with each step, in memory that copies run to and from by themselves.

    free ──fill──► sent ──its event is over, and read──► free

There are a few slots. One is filled again only when the result of its step has been read: the copy to the GPU is over
then too.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.kernels.step_inputs import IntArray
from pipeline.kernels.triton.step import HEADER, RUN_WORDS, STAMP_WORDS, Head, words_of
from pipeline.stages.execute.cuda.device import Device, StreamEvent

NUM_SLOTS = 8
"""More than steps can be in flight."""

Run = tuple[int, "np.ndarray[Any, np.dtype[np.int32]]"]
"""A place in the state of the rows, and the numbers that go there."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A step as the host knows it, one value for each entry; see `pipeline.kernels.triton.rows.StepArrays`."""

    rows: IntArray
    starts: IntArray
    counts: IntArray
    offsets: IntArray
    sampled: IntArray
    """Entries of which an id is drawn."""
    num_tokens: int


_HEAD = slice(Head.NUM_TOKENS, Head.RUNS_AT + 1)
_TOKENS_AT = int(Head.TOKENS_AT)

NO_INTS: IntArray = np.zeros(0, np.int32)
EMPTY = Batch(NO_INTS, NO_INTS, NO_INTS, NO_INTS, NO_INTS, 0)


@dataclass(slots=True)
class Slot:
    """`words` [capacity] and `result` as kernels/triton/step.py has them, each as tensor and as array."""

    words: Tensor
    words_array: IntArray
    result: Tensor
    result_array: IntArray
    times: "np.ndarray[Any, np.dtype[np.int64]]"
    """When the step of the result began and ended, by the GPU's clock; 0 where kernels are interpreted."""
    done: StreamEvent
    fixed: Tensor
    """The words that a step has in any case."""
    _results: dict[int, Tensor] = field(default_factory=dict)
    """Views take as long to make as copies to begin, and there are few sizes: they are kept."""

    def result_of(self, num_samples: int) -> Tensor:
        """The part of `result` for so many samples, with padding."""
        view = self._results.get(num_samples)
        if view is None:
            view = self._results[num_samples] = self.result[: STAMP_WORDS + 2 * num_samples]
        return view


class Staging:
    """Owns the slots, and the words on the device."""

    def __init__(self, device: Device, max_num_rows: int, max_num_tokens: int) -> None:
        self._max_num_rows = max_num_rows
        self._fixed = words_of(max_num_rows)
        # Room for the tokens of the largest step, and as much for changes; what is more goes ahead of the step.
        self.capacity = 1 << (self._fixed + 2 * max_num_tokens + 4096 - 1).bit_length()
        self.words = torch.zeros(self.capacity, dtype=torch.int32, device=device.where)
        self._fixed_words = self.words[: self._fixed]
        self._free = deque(self._slot(device) for _ in range(NUM_SLOTS))

    def _slot(self, device: Device) -> Slot:
        words = device.pinned(self.capacity, torch.int32)
        result = device.pinned(STAMP_WORDS + 2 * self._max_num_rows, torch.int32)
        times = result.numpy()[:STAMP_WORDS].view(np.int64)
        return Slot(words, words.numpy(), result, result.numpy(), times, device.event(), words[: self._fixed])

    @property
    def has_free(self) -> bool:
        """Whether there are two slots: a step's own, and one for changes that go ahead of it."""
        return len(self._free) > 1

    def take(self) -> Slot:
        """A slot, which is in use until `give`."""
        assert self._free, f"more than {NUM_SLOTS} steps are in flight"
        return self._free.popleft()

    def give(self, slot: Slot) -> None:
        """The result has been read."""
        self._free.append(slot)

    def room(self, batch: Batch) -> int:
        """Words for changes that fit beside a batch, with `RUN_WORDS` for each run."""
        return self.capacity - self._fixed - batch.num_tokens

    def fill(self, slot: Slot, batch: Batch, runs: list[Run], *, one_each: bool) -> None:
        """Write a step, and copy it to the device. `one_each` as for `prepare`, which then reads no entries of
        tokens."""
        words, most = slot.words_array, self._max_num_rows
        num, at = len(batch.rows), self._fixed
        words[_HEAD] = batch.num_tokens, num, len(batch.sampled), len(runs), at
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
        """Returns where they end."""
        table = words[at : at + RUN_WORDS * len(runs)].reshape(-1, RUN_WORDS)
        at += RUN_WORDS * len(runs)
        for i, (target, numbers) in enumerate(runs):
            table[i] = target, len(numbers), at
            words[at : at + len(numbers)] = numbers
            at += len(numbers)
        return at

    def _copy(self, slot: Slot, num: int) -> None:
        if num == self._fixed:
            self._fixed_words.copy_(slot.fixed, non_blocking=True)
        else:
            self.words[:num].copy_(slot.words[:num], non_blocking=True)


def num_words(runs: list[Run]) -> int:
    """That changes take."""
    return sum(RUN_WORDS + len(numbers) for _, numbers in runs)


def split_runs(runs: list[Run], room: int) -> tuple[list[Run], list[Run]]:
    """The first of them, as many as take `room` words, and the others. One that is in the way is cut in two."""
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
