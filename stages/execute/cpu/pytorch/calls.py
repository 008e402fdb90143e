"""A program's torch calls: a flat list that is recorded once and replayed for each step.

Recording: a program allocates buffers and adds calls whose arguments are buffers, weights and constants. Nothing is
computed. Replaying: each buffer is cut to the step's number of tokens or samples, and the calls are made in order.
Buffers don't move, so the bound calls for a pair of numbers are cached: a step of a recent size costs no more than the
calls themselves.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from pipeline.kernels.step_inputs import StepInputs

MAX_BOUND_SIZES = 64
"""Pairs of numbers whose bound calls are cached."""


class Extent(Enum):
    """The first dimension of a buffer."""

    TOKENS = "tokens"
    SAMPLES = "samples"


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """Memory for the largest step; a step uses its beginning."""

    storage: Tensor
    extent: Extent


@dataclass(frozen=True, slots=True)
class TorchCall:
    """An op and its arguments. A `Buffer` stands for the part of it that the step uses."""

    op: Callable[..., None]
    args: tuple[Any, ...]


class TorchCalls:
    """The calls of one forward pass over `inputs`."""

    def __init__(self, inputs: StepInputs, dtype: torch.dtype) -> None:
        self.inputs = inputs
        self.calls: list[TorchCall] = []
        self.ids = Buffer(torch.from_numpy(inputs.ids), Extent.TOKENS)
        self.positions = Buffer(torch.from_numpy(inputs.positions), Extent.TOKENS)
        self.position_rows = Buffer(torch.from_numpy(inputs.position_rows), Extent.TOKENS)
        self.slots = [Buffer(torch.from_numpy(slots), Extent.TOKENS) for slots in inputs.group_slots]
        """By KV group."""
        self.sampled = Buffer(torch.from_numpy(inputs.sampled), Extent.SAMPLES)
        self._dtype = dtype
        self._bound: OrderedDict[tuple[int, int], list[tuple[Callable[..., None], tuple[Any, ...]]]] = OrderedDict()

    def buffer(self, width: int, extent: Extent = Extent.TOKENS, dtype: torch.dtype | None = None) -> Buffer:
        """Allocate `width` numbers per token or sample."""
        most = self.inputs.max_num_tokens if extent is Extent.TOKENS else self.inputs.max_num_samples
        return Buffer(torch.zeros(most, width, dtype=dtype or self._dtype), extent)

    def add(self, op: Callable[..., None], *args: Any) -> None:
        """Record a call."""
        self.calls.append(TorchCall(op, args))

    def run(self, first: int = 0, end: int | None = None) -> None:
        """Make the calls for the step in `inputs`; only those from `first` to before `end`."""
        for op, args in self._bind(self.inputs.num_tokens, self.inputs.num_samples)[first:end]:
            op(*args)

    def view(self, buffer: Buffer) -> Tensor:
        """The part of a buffer that the step in `inputs` uses."""
        return _cut(buffer, self.inputs.num_tokens, self.inputs.num_samples)

    def _bind(self, num_tokens: int, num_samples: int) -> list[tuple[Callable[..., None], tuple[Any, ...]]]:
        size = num_tokens, num_samples
        if size in self._bound:
            self._bound.move_to_end(size)
            return self._bound[size]
        bound = [
            (call.op, tuple(_cut(arg, *size) if isinstance(arg, Buffer) else arg for arg in call.args))
            for call in self.calls
        ]
        self._bound[size] = bound
        if len(self._bound) > MAX_BOUND_SIZES:
            self._bound.popitem(last=False)
        return bound


def _cut(buffer: Buffer, num_tokens: int, num_samples: int) -> Tensor:
    return buffer.storage[: num_tokens if buffer.extent is Extent.TOKENS else num_samples]
