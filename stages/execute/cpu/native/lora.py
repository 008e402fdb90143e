"""LoRA adapters of a program in the CPU library: kernels/cpu/lora.h.

Each matmul that adapters may change has a site, with the matrices of every slot. An adapter is packed beside the steps;
between two of them, a slot is made to point to it.
"""

import ctypes
import mmap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from pipeline.kernels.cpu import native
from pipeline.kernels.cpu.native import ActivationForm
from pipeline.lora.adapter_file import AdapterFile, Target
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.adapters.slots import LoraPlan, num_outputs, row_order
from pipeline.stages.execute.cpu.native.memory import PAIR, NativeMemory, turning_order

RANKS = 4
"""Ranks whose A are interleaved; the ranks of a projection are padded to a multiple of them."""
DEPTH = 32
"""Inputs of each of them that lie side by side."""
LINE = 64
"""Bytes that matrices are aligned to."""

Halves = np.ndarray[Any, np.dtype[np.uint16]]


@dataclass(slots=True)
class _Site:
    layer: int
    targets: tuple[Target, ...]
    interleaved: bool
    depth: int
    """Inputs."""
    adapters: Any
    """An array of `NativeLoraAdapter`, one for each slot."""


class _Layout(NamedTuple):
    """Of an adapter at a site; empty if it changes none of its projections."""

    ranks: list[int]
    """Of each projection, padded."""
    num_bytes: list[int]
    """Of A, and of each B."""


class PackedAdapter(NamedTuple):
    """An adapter in memory."""

    buffer: native.ByteArray
    adapters: list[native.NativeLoraAdapter]
    """Of each site; they point into the buffer."""


class NativeLora:
    """Owns the sites of a program."""

    def __init__(
        self, library: ctypes.CDLL, memory: NativeMemory, plan: LoraPlan, config: ModelConfig, max_num_tokens: int
    ) -> None:
        self._library, self._memory, self._plan, self._config = library, memory, plan, config
        self._stride = native.LORA_TARGETS * _padded(plan.max_rank, RANKS)
        self._shrunk = memory.floats(max_num_tokens, self._stride)
        self._sites: list[_Site] = []
        self._buffers: dict[int, native.ByteArray] = {}
        """The memory of each slot."""
        self._orders = {target: self._order(target) for target in ("q_proj", "k_proj")}

    def emit(
        self,
        handle: int,
        layer: int,
        targets: tuple[Target, ...],
        rows: native.NativeRows,
        form: ActivationForm,
        depth: int,
        *,
        interleaved: bool = False,
    ) -> None:
        """Let adapters change the matmul that is recorded next: it has these projections, one below the other or
        interleaved, and reads `rows`."""
        adapters = (native.NativeLoraAdapter * self._plan.num_slots)()
        panels = [-(-num_outputs(self._config, target) // native.PANEL) for target in targets]
        ends = list(accumulate(panels)) + [0] * (native.LORA_TARGETS - len(targets))
        site = native.NativeLoraSite(
            ctypes.addressof(adapters),
            self._shrunk,
            self._stride,
            len(targets),
            (ctypes.c_int * native.LORA_TARGETS)(*ends),
            interleaved,
            depth,
        )
        self._memory.keep((adapters, site))
        self._sites.append(_Site(layer, targets, interleaved, depth, adapters))
        self._library.program_lora(handle, ctypes.byref(site), rows, form)

    def pack(self, file: AdapterFile) -> PackedAdapter:
        """The matrices of all sites, in the order in which steps read them. Any thread may call this."""
        assert file.header.dtype == "bf16", "the CPU library computes adapters in bfloat16"
        sizes = [self._layout(site, file) for site in self._sites]
        buffer = _pages(sum(_padded(size, LINE) for each in sizes for size in each.num_bytes))
        adapters, begin = [], 0
        for site, layout in zip(self._sites, sizes, strict=True):
            adapter = native.NativeLoraAdapter()
            if layout.num_bytes:
                adapter.rank = sum(layout.ranks)
                assert adapter.rank <= self._stride, f"an adapter of rank {adapter.rank}, at most {self._stride} fit"
                for index, (matrix, num_bytes) in enumerate(
                    zip(self._matrices(site, layout, file), layout.num_bytes, strict=True)
                ):
                    target = buffer[begin : begin + num_bytes]
                    begin += _padded(num_bytes, LINE)
                    if matrix is None:
                        continue
                    target.view(np.uint16).reshape(matrix.shape)[:] = matrix
                    if index == 0:
                        adapter.a = target.ctypes.data
                    else:
                        adapter.b[index - 1] = target.ctypes.data
                for index, rank in enumerate(layout.ranks):
                    adapter.ranks[index] = rank
            adapters.append(adapter)
            time.sleep(0)  # the thread of the steps may have waited for the interpreter
        return PackedAdapter(buffer, adapters)

    def put(self, slot: int, packed: PackedAdapter) -> None:
        """Put an adapter into a slot. No step may run."""
        for site, adapter in zip(self._sites, packed.adapters, strict=True):
            site.adapters[slot] = adapter
        self._buffers[slot] = packed.buffer

    def _layout(self, site: _Site, file: AdapterFile) -> _Layout:
        ranks = [_padded(file.rank(site.layer, target), RANKS) for target in site.targets]
        if not any(ranks):
            return _Layout([], [])
        if site.interleaved:
            ranks = [max(ranks)] * len(ranks)
        rows = [_padded(num_outputs(self._config, target), native.PANEL) for target in site.targets]
        b = [2 * outputs * rank for outputs, rank in zip(rows, ranks, strict=True)]
        if site.interleaved:
            b = [sum(b)]
        return _Layout(ranks, [2 * sum(ranks) * _padded(site.depth, DEPTH), *b])

    def _matrices(self, site: _Site, layout: _Layout, file: AdapterFile) -> "Iterator[Halves | None]":
        """A, and the B of each projection, or of both if they are interleaved; None for those that the adapter does not
        change. In the shapes in which they are read, which are views where possible."""
        pairs = [file.matrices(site.layer, target) for target in site.targets]
        a = np.zeros((sum(layout.ranks), _padded(site.depth, DEPTH)), np.uint16)
        begin = 0
        for pair, rank in zip(pairs, layout.ranks, strict=True):
            if pair is not None:
                a[begin : begin + len(pair[0]), : site.depth] = pair[0]
            begin += rank
        grouped = a.reshape(len(a) // RANKS, RANKS, -1, DEPTH).transpose(0, 2, 1, 3)
        if self._library.act_bytes() == 2:
            yield grouped
        else:  # in the order 0, 16, 1, 17, … of each 32
            halves = grouped.reshape(*grouped.shape[:3], 2, DEPTH // 2)
            yield halves.swapaxes(3, 4)
        bs = [
            self._rows(target, rank, pair) if rank else None
            for target, rank, pair in zip(site.targets, layout.ranks, pairs, strict=True)
        ]
        if site.interleaved:
            # Eight outputs of the first, then the eight of the second beside them.
            first, second = (b.reshape(-1, PAIR, b.shape[1]) for b in bs if b is not None)
            bs = [np.stack([first, second], axis=1).reshape(-1, first.shape[2])]
        for b in bs:
            # As [outputs / 16], [rank / 2], [16], [2].
            yield None if b is None else b.reshape(-1, native.PANEL, b.shape[1] // 2, 2).transpose(0, 2, 1, 3)

    def _rows(self, target: Target, rank: int, pair: "tuple[Halves, Halves] | None") -> Halves:
        """B in the order of the panels, with zeros up to whole panels and up to `rank`."""
        num_rows = num_outputs(self._config, target)
        padded = np.zeros((_padded(num_rows, native.PANEL), rank), np.uint16)
        if pair is not None:
            order = self._orders.get(target)
            padded[:num_rows, : pair[1].shape[1]] = pair[1] if order is None else pair[1][order]
        return padded

    def _order(self, target: Target) -> "np.ndarray[Any, np.dtype[np.int32]]":
        """The rows of B in the order in which queries or keys lie in panels."""
        config = self._config
        num_heads = config.num_heads if target == "q_proj" else config.num_kv_heads
        turned = turning_order(num_heads, range(num_heads), config.head_dim)
        order = row_order(config, target)
        return turned if order is None else order[turned]


def _pages(num_bytes: int) -> native.ByteArray:
    """Memory in huge pages if possible. `ThreadPool.allocate` is only for the thread that computes."""
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= native.HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def _padded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
