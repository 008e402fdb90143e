"""LoRA adapters of a program in the CPU library: kernels/cpu/lora.h.

Each matmul that adapters may change has a site, with the matrices of every slot. An adapter is packed into them between
two steps, when no thread reads them.
"""

import ctypes
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from pipeline.kernels.cpu import native
from pipeline.kernels.cpu.native import Form
from pipeline.lora.adapter_file import AdapterFile, Target
from pipeline.runtime.model_folder import ModelConfig
from pipeline.stages.execute.adapters import LoraPlan, num_outputs, row_order
from pipeline.stages.execute.cpu.native_memory import PAIR, NativeMemory, turning_order

RANKS = 4
"""Ranks whose A are interleaved; the ranks of a projection are padded to a multiple of them."""
DEPTH = 32
"""Inputs of each of them that lie side by side."""

Halves = np.ndarray[Any, np.dtype[np.uint16]]


@dataclass(slots=True)
class _Site:
    layer: int
    targets: tuple[Target, ...]
    interleaved: bool
    adapters: Any
    """An array of `NativeLoraAdapter`, one for each slot."""


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

    def record(
        self,
        handle: int,
        layer: int,
        targets: tuple[Target, ...],
        rows: native.NativeRows,
        form: Form,
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
        self._sites.append(_Site(layer, targets, interleaved, adapters))
        self._library.program_lora(handle, ctypes.byref(site), rows, form)

    def load(self, slot: int, file: AdapterFile) -> None:
        """Put an adapter into a slot. No step may run."""
        assert file.header.dtype == "bf16", "the CPU library computes adapters in bfloat16"
        packed = [self._packed_for(site, file) for site in self._sites]
        num_bytes = sum(_aligned(each.nbytes) for matrices in packed for each in matrices if each is not None)
        if num_bytes > len(self._buffers.get(slot, b"")):
            self._buffers[slot] = self._memory.buffer(num_bytes)
        begin = 0
        for site, matrices in zip(self._sites, packed, strict=True):
            adapter = native.NativeLoraAdapter()
            for place, each in enumerate(matrices):
                if each is None:
                    continue
                # In the order in which steps read them, in huge pages.
                target = self._buffers[slot][begin : begin + each.nbytes]
                target[:] = each.reshape(-1).view(np.uint8)
                begin += _aligned(each.nbytes)
                if place == 0:
                    adapter.a, adapter.rank = target.ctypes.data, each.shape[0] * RANKS
                else:
                    adapter.b[place - 1], adapter.ranks[place - 1] = target.ctypes.data, 2 * each.shape[1]
            if site.interleaved:
                adapter.ranks[1] = adapter.ranks[0]
            assert adapter.rank <= self._stride, f"an adapter of rank {adapter.rank}, at most {self._stride} fit"
            site.adapters[slot] = adapter

    def _packed_for(self, site: _Site, file: AdapterFile) -> "list[Halves | None]":
        """A, and the B of each projection, or of both if they are interleaved; None for those that the adapter does not
        change."""
        pairs = [file.matrices(site.layer, target) for target in site.targets]
        if not any(pairs):
            return [None]
        ranks = [0 if pair is None else _padded(len(pair[0]), RANKS) for pair in pairs]
        if site.interleaved:
            ranks = [max(ranks)] * len(ranks)
        inputs = next(pair[0].shape[1] for pair in pairs if pair is not None)
        a = np.zeros((sum(ranks), _padded(inputs, DEPTH)), np.uint16)
        bs: list[Halves | None] = []
        begin = 0
        for target, pair, rank in zip(site.targets, pairs, ranks, strict=True):
            b = None
            if pair is not None:
                a[begin : begin + len(pair[0]), :inputs] = pair[0]
            if rank:
                b = self._rows(target, rank, pair)
            bs.append(b)
            begin += rank
        if site.interleaved:
            # Eight outputs of the first, then the eight of the second beside them.
            first, second = (b.reshape(-1, PAIR, b.shape[1]) for b in bs if b is not None)
            bs = [np.stack([first, second], axis=1).reshape(-1, first.shape[2])]
        blocks = a.reshape(len(a) // RANKS, RANKS, -1, DEPTH).transpose(0, 2, 1, 3)
        return [np.ascontiguousarray(blocks), *(None if b is None else _packed_outputs(b) for b in bs)]

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
        turned = turning_order(num_heads, num_heads, config.head_dim)
        order = row_order(config, target)
        return turned if order is None else order[turned]


def _packed_outputs(b: Halves) -> Halves:
    """B [outputs, rank] in the order in which it is read: [outputs / 16][rank / 2][16][2]."""
    outputs, rank = b.shape
    return np.ascontiguousarray(b.reshape(outputs // native.PANEL, native.PANEL, rank // 2, 2).transpose(0, 2, 1, 3))


def _padded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _aligned(num_bytes: int) -> int:
    return _padded(num_bytes, 64)
