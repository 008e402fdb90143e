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
"""Ranks whose A are interleaved."""

Halves = np.ndarray[Any, np.dtype[np.uint16]]


@dataclass(slots=True)
class _Site:
    layer: int
    targets: tuple[Target, ...]
    adapters: Any
    """An array of `NativeLoraAdapter`, one for each slot."""


class NativeLora:
    """Owns the sites of a program."""

    def __init__(
        self, library: ctypes.CDLL, memory: NativeMemory, plan: LoraPlan, config: ModelConfig, max_num_tokens: int
    ) -> None:
        self._library, self._memory, self._plan, self._config = library, memory, plan, config
        self._stride = -(-native.LORA_TARGETS * plan.max_rank // RANKS) * RANKS
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
        halves = [-(-num_outputs(self._config, target) // native.PANEL) * 2 for target in targets]
        ends = list(accumulate(halves)) + [0] * (native.LORA_TARGETS - len(targets))
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
        self._sites.append(_Site(layer, targets, adapters))
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
                    adapter.b[place - 1], adapter.ranks[place - 1] = target.ctypes.data, each.shape[1]
            assert adapter.rank <= self._stride, f"an adapter of rank {adapter.rank}, at most {self._stride} fit"
            site.adapters[slot] = adapter

    def _packed_for(self, site: _Site, file: AdapterFile) -> "list[Halves | None]":
        """A, and the B of each projection; None for those that the adapter does not change."""
        pairs = [file.matrices(site.layer, target) for target in site.targets]
        inputs = [pair[0] for pair in pairs if pair is not None]
        packed: list[Halves | None] = [_packed_inputs(np.concatenate(inputs)) if inputs else None]
        for target, pair in zip(site.targets, pairs, strict=True):
            packed.append(None if pair is None else self._packed(target, pair[1]))
        return packed

    def _packed(self, target: Target, b: Halves) -> Halves:
        """B [outputs, rank] in the order of the panels: [outputs / 8][rank][8], with zeros up to whole panels."""
        order = self._orders.get(target)
        rows = b if order is None else b[order]
        padded = -(-len(rows) // native.PANEL) * native.PANEL
        if padded > len(rows):
            rows = np.concatenate([rows, np.zeros((padded - len(rows), rows.shape[1]), np.uint16)])
        return np.ascontiguousarray(rows.reshape(-1, PAIR, rows.shape[1]).transpose(0, 2, 1))

    def _order(self, target: Target) -> "np.ndarray[Any, np.dtype[np.int32]]":
        """The rows of B in the order in which queries or keys lie in panels."""
        config = self._config
        num_heads = config.num_heads if target == "q_proj" else config.num_kv_heads
        turned = turning_order(num_heads, range(num_heads), config.head_dim)
        order = row_order(config, target)
        return turned if order is None else order[turned]


def _packed_inputs(a: Halves) -> Halves:
    """A [rank, inputs] in the order in which it is read: [rank / 4][inputs / 16][4][16], with zeros at the ends."""
    rank, inputs = a.shape
    padded = np.zeros((-(-rank // RANKS) * RANKS, -(-inputs // native.PANEL) * native.PANEL), np.uint16)
    padded[:rank, :inputs] = a
    blocks = padded.reshape(len(padded) // RANKS, RANKS, -1, native.PANEL)
    return np.ascontiguousarray(blocks.transpose(0, 2, 1, 3))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 64) * 64
