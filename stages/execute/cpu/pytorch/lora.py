"""LoRA adapters of a torch program: the reference for kernels/cpu/lora.h, in float32."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pipeline.kernels.linear import multiply
from pipeline.kernels.step_inputs import StepInputs
from pipeline.lora.adapter_file import AdapterFile, Target
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.adapters.slots import LoraPlan, num_outputs, row_order

Matrices = list[tuple[int, int, Tensor, Tensor]]
"""The first output and the end, A and B of each projection that an adapter changes."""


@dataclass(slots=True)
class LoraSite:
    """A matmul that adapters may change: its projections, one below the other."""

    layer: int
    targets: tuple[Target, ...]
    slots: list[Matrices] = field(default_factory=list)


class TorchLora:
    """Owns the sites of a program."""

    def __init__(self, plan: LoraPlan, config: ModelConfig, inputs: StepInputs) -> None:
        self._plan, self._config, self._inputs = plan, config, inputs
        self._sites: list[LoraSite] = []

    def site(self, layer: int, targets: tuple[Target, ...]) -> LoraSite:
        """A new site."""
        self._sites.append(site := LoraSite(layer, targets, [[] for _ in range(self._plan.num_slots)]))
        return site

    def add(self, out: Tensor, x: Tensor, site: LoraSite) -> None:
        """out += B A x, for the rows with adapters. out [N, outputs], x [N, inputs]."""
        if not self._inputs.num_adapted[0]:
            return
        slots = self._inputs.adapters[: len(x)]
        for slot in np.unique(slots[slots >= 0]).tolist():
            if site.slots[slot]:
                rows = torch.from_numpy(np.flatnonzero(slots == slot))
                taken = x[rows].float()
                for begin, end, a, b in site.slots[slot]:
                    out[rows, begin:end] = (out[rows, begin:end].float() + multiply(multiply(taken, a), b)).to(
                        out.dtype
                    )

    def put(self, slot: int, packed: list[Matrices]) -> None:
        """Put an adapter into a slot."""
        for site, matrices in zip(self._sites, packed, strict=True):
            site.slots[slot] = matrices

    def pack(self, file: AdapterFile) -> list[Matrices]:
        """The matrices of each site, as float32."""
        packed = []
        for site in self._sites:
            matrices: Matrices = []
            begin = 0
            for target in site.targets:
                end = begin + num_outputs(self._config, target)
                if (pair := file.matrices(site.layer, target)) is not None:
                    a, b = (_floats(array) for array in pair)
                    order = row_order(self._config, target)
                    matrices.append((begin, end, a, b if order is None else b[torch.from_numpy(order).long()]))
                begin = end
            packed.append(matrices)
        return packed


def _floats(array: "np.ndarray[tuple[int, int], np.dtype[np.generic]]") -> Tensor:
    tensor = torch.from_numpy(array.copy())
    return tensor.view(torch.bfloat16).float() if array.dtype == np.uint16 else tensor.float()
