"""LoRA adapters of a model on a GPU: the memory of their matrices, and loading them into it."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.kernels.triton import lora
from pipeline.kernels.triton.lora import LoraMatrices
from pipeline.lora.adapter_file import AdapterFile, Target
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.adapters.slots import LoraPlan, num_outputs, row_order
from pipeline.stages.execute.cuda.device import Device

PackedAdapter = tuple["np.ndarray[Any, Any]", "np.ndarray[Any, np.dtype[np.int32]]"]


@dataclass(frozen=True, slots=True)
class LoraSite:
    """A linear layer that adapters may change."""

    number: int
    layer: int
    targets: tuple[Target, ...]
    num_inputs: int
    num_outputs: tuple[int, ...]
    a_at: int
    """Offset in a slot: A [targets, R, K]."""
    b_at: int
    """B [R, N]"""
    end: int


class DeviceLora:
    """Owns the slots. R is `max_rank` of the plan, K the inputs of a layer, N its outputs."""

    def __init__(
        self, device: Device, plan: LoraPlan, config: ModelConfig, dtype: torch.dtype, max_num_tokens: int
    ) -> None:
        self._device, self._plan, self._config, self._dtype = device, plan, config, dtype
        self._sites: list[LoraSite] = []
        self._memory: Tensor | None = None
        """[slots, all matrices of an adapter]"""
        self._ranks = torch.zeros(0, dtype=torch.int32)
        """[slots, sites, MAX_TARGETS]"""
        self._matrices: list[LoraMatrices] = []
        self._shrunk = lora.scratch(max_num_tokens, plan.max_rank, device.where)

    def site(self, layer: int, targets: tuple[Target, ...], num_inputs: int) -> LoraSite:
        """A new site. Call it before `allocate`."""
        outputs = tuple(num_outputs(self._config, target) for target in targets)
        begin = self._sites[-1].end if self._sites else 0
        b_at = begin + len(targets) * self._plan.max_rank * num_inputs
        end = b_at + self._plan.max_rank * sum(outputs)
        self._sites.append(LoraSite(len(self._sites), layer, targets, num_inputs, outputs, begin, b_at, end))
        return self._sites[-1]

    def allocate(self) -> None:
        """Allocate the slots, when all sites are known."""
        slots, rank, where = self._plan.num_slots, self._plan.max_rank, self._device.where
        total = self._sites[-1].end if self._sites else 0
        self._memory = torch.zeros(slots, total, dtype=self._dtype, device=where)
        self._ranks = torch.zeros(slots, len(self._sites), lora.MAX_TARGETS, dtype=torch.int32, device=where)
        for site in self._sites:
            num, outputs = len(site.targets), sum(site.num_outputs)
            a = self._memory[:, site.a_at : site.b_at].view(slots, num, rank, site.num_inputs)
            b = self._memory[:, site.b_at : site.end].view(slots, rank, outputs)
            ranks = self._ranks[:, site.number, :num]
            self._matrices.append(LoraMatrices(a, b, ranks, tuple(accumulate(site.num_outputs))))

    def add(self, split_k_partials: Tensor, x: Tensor, adapters: Tensor, site: LoraSite) -> None:
        """Add what adapters change to the first partial of [P, T, N]. x [T, K], adapters [T] int32."""
        lora.add(split_k_partials[0], x, adapters, self._matrices[site.number], self._shrunk)

    def put(self, slot: int, packed: PackedAdapter) -> None:
        """Put an adapter into a slot: later launches use it, those in flight do not."""
        assert self._memory is not None
        values, ranks = packed
        self._memory[slot].copy_(self._device.send(values).view(self._dtype), non_blocking=True)
        self._ranks[slot].copy_(self._device.send(ranks), non_blocking=True)

    def pack(self, file: AdapterFile) -> PackedAdapter:
        """All numbers of a slot (bfloat16 as int16), and the ranks. Any thread may call this."""
        total = self._sites[-1].end if self._sites else 0
        item = np.dtype(np.int16 if self._dtype == torch.bfloat16 else np.float32)
        values = np.zeros(total, item)
        ranks = np.zeros((len(self._sites), lora.MAX_TARGETS), np.int32)
        for site in self._sites:
            a = values[site.a_at : site.b_at].reshape(len(site.targets), -1, site.num_inputs)
            b = values[site.b_at : site.end].reshape(self._plan.max_rank, -1)
            begin = 0
            for index, (target, outputs) in enumerate(zip(site.targets, site.num_outputs, strict=True)):
                if (pair := file.matrices(site.layer, target)) is not None:
                    down, up = (array.view(item) for array in pair)
                    rank = ranks[site.number, index] = len(down)
                    order = row_order(self._config, target)
                    a[index, :rank] = down
                    b[:rank, begin : begin + outputs] = (up if order is None else up[order]).T
                begin += outputs
        return values, ranks
