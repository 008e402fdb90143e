"""Copies KV blocks for a step: to swap space, from it, and from block to block.

Swap space is host memory. To swap out, the compute stream gathers blocks into one piece, which is fast, and the copy
stream sends it over the bus beside the step. Swapping in goes the other way, and the step waits for it:

    compute   gather ─────┐              ┌─► scatter │ the step, which may write to blocks that went out
    copy                  └─► out · in ──┘

All copies over the bus keep the order of the plan, because one step may write and read the same slot of swap space.
Each of the two staging buffers has an event: it is not reused before its copy is done. A step's result counts as
complete when its copies are, because the scheduler then reuses blocks and slots.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from pipeline.kernels.step_inputs import IntArray
from pipeline.kernels.triton import copy
from pipeline.stages.execute.cuda.device import Device, StreamEvent, locked_blocks
from pipeline.stages.execute.kv import SwapArray

PACKED_BYTES = 32 * 1024**2
"""Size of a staging buffer; it holds at least one block."""
NUM_STAGING_BUFFERS = 2


@dataclass(frozen=True, slots=True)
class HostTransfer:
    """A step's copies over the bus."""

    began: StreamEvent
    ended: StreamEvent

    @property
    def seconds(self) -> float:
        """Time from the first copy to the end of the last. They must be complete."""
        return self.began.elapsed_time(self.ended) / 1000


class _StagingBuffer:
    """Packed blocks between KV memory and the bus, with the events after which each side may reuse them."""

    def __init__(self, device: Device, num_blocks: int, pieces: int, words: int) -> None:
        self.packed = torch.zeros(num_blocks, pieces, words, dtype=torch.int32, device=device.where)
        self.computed = device.event()
        self.copied = device.event()


class BlockCopier:
    """Owned by the runner. `kv` is the KV memory, blocks its third dimension; `swap` the swap space, or None."""

    def __init__(self, device: Device, kv: Tensor, swap: SwapArray | None) -> None:
        self._device = device
        num_layers, parts, self._num_blocks = kv.shape[:3]
        self._memory = kv.view(torch.int32).view(num_layers * parts, self._num_blocks, -1)
        pieces, _, words = self._memory.shape
        self._block_bytes = pieces * words * 4
        self._locked_blocks = locked_blocks(self._block_bytes)
        self._swap = None if swap is None else torch.from_numpy(swap).view(torch.int32).view(-1, pieces, words)
        if swap is not None and not device.lock(swap):
            logging.getLogger("pipeline").warning(
                "swap space can't be pinned for the GPU: copies to and from it block steps"
            )
        num = max(1, PACKED_BYTES // self._block_bytes)
        self._buffers = [_StagingBuffer(device, num, pieces, words) for _ in range(NUM_STAGING_BUFFERS)]
        self._next = 0
        self._begins: HostTransfer | None = None
        """The transfer of the current step, until its first copy over the bus."""

    def compile(self) -> None:
        """Make all launches. For `Device.compiling`."""
        first, packed = self._sent([0]), self._buffers[0].packed
        copy.gather(packed, self._memory, first)
        copy.scatter(self._memory, first, packed)
        copy.fork(self._memory, first, first)

    def enqueue(self, sources: IntArray, targets: IntArray) -> HostTransfer | None:
        """Enqueue copies in order. Ids from the number of KV blocks on are slots of swap space.

        Returns the transfer over the bus, if any. The step is complete only after it.
        """
        host_transfer: HostTransfer | None = None
        for kind, from_blocks, to_blocks in self._runs(sources, targets):
            if host_transfer is None and kind != (False, False):
                host_transfer = self._begins = HostTransfer(
                    self._device.event(timed=True), self._device.event(timed=True)
                )
            for begin in range(0, len(from_blocks), len(self._buffers[0].packed)):
                part = slice(begin, begin + len(self._buffers[0].packed))
                if kind == (False, False):
                    self._fork(from_blocks[part], to_blocks[part])
                elif kind == (False, True):
                    self._out(from_blocks[part], to_blocks[part])
                elif kind == (True, False):
                    self._in(from_blocks[part], to_blocks[part])
                else:
                    raise AssertionError(f"a copy inside swap space: {from_blocks[part]} to {to_blocks[part]}")
        if host_transfer is not None:
            with self._device.copying():
                host_transfer.ended.record()
        return host_transfer

    def _runs(self, sources: IntArray, targets: IntArray) -> Iterator[tuple[tuple[bool, bool], list[int], list[int]]]:
        """Consecutive independent copies of one kind: (is from swap, is to swap), sources, targets."""
        most = self._num_blocks
        pairs = list(zip(sources.tolist(), targets.tolist(), strict=True))
        for kind, group in groupby(pairs, key=lambda pair: (pair[0] >= most, pair[1] >= most)):
            # A dict for fast lookups: a long sequence has thousands of blocks. A source may appear more than once.
            from_blocks: list[int] = []
            to_blocks: dict[int, None] = {}
            read: set[int] = set()
            for source, target in group:
                if source in to_blocks or target in to_blocks or target in read:
                    yield kind, from_blocks, list(to_blocks)
                    from_blocks, to_blocks, read = [], {}, set()
                from_blocks.append(source)
                to_blocks[target] = None
                read.add(source)
            yield kind, from_blocks, list(to_blocks)

    def _next_buffer(self) -> _StagingBuffer:
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % NUM_STAGING_BUFFERS
        return buffer

    def _begin(self) -> None:
        """Record the begin of the first copy over the bus, after the earlier work of the compute stream."""
        if self._begins is not None:
            self._begins.began.record()
            self._begins = None

    def _sent(self, blocks: list[int]) -> Tensor:
        return self._device.send(np.array(blocks, np.int32))

    def _fork(self, from_blocks: list[int], to_blocks: list[int]) -> None:
        copy.fork(self._memory, self._sent(to_blocks), self._sent(from_blocks))

    def _out(self, blocks: list[int], slots: list[int]) -> None:
        assert self._swap is not None
        buffer = self._next_buffer()
        buffer.copied.wait()
        copy.gather(buffer.packed, self._memory, self._sent(blocks))
        buffer.computed.record()
        with self._device.copying():
            buffer.computed.wait()
            self._begin()
            for begin, end, first_slot in self._ranges(slots):
                self._device.copy(self._swap[first_slot : first_slot + end - begin], buffer.packed[begin:end])
            buffer.copied.record()

    def _in(self, slots: list[int], blocks: list[int]) -> None:
        assert self._swap is not None
        buffer = self._next_buffer()
        with self._device.copying():
            buffer.computed.wait()
            self._begin()
            for begin, end, first_slot in self._ranges(slots):
                self._device.copy(buffer.packed[begin:end], self._swap[first_slot : first_slot + end - begin])
            buffer.copied.record()
        buffer.copied.wait()
        copy.scatter(self._memory, self._sent(blocks), buffer.packed)
        buffer.computed.record()

    def _ranges(self, slots: list[int]) -> Iterator[tuple[int, int, int]]:
        """Ranges of consecutive slots in one piece of pinned memory: begin and end in the list, and the place of the
        first in swap space."""
        begin = 0
        for i in range(1, len(slots) + 1):
            first_slot = slots[i - 1] + 1 - self._num_blocks
            if i == len(slots) or slots[i] != slots[i - 1] + 1 or first_slot % self._locked_blocks == 0:
                yield begin, i, slots[begin] - self._num_blocks
                begin = i
