"""A vision tower's program in torch."""

import numpy as np
import torch
from torch import Tensor

from pipeline.kernels.patches import CENTER, PatchInputs
from pipeline.kernels.sampling.logprob_inputs import FloatArray
from pipeline.stages.execute.cpu.program import ProgramPlan
from pipeline.stages.execute.cpu.pytorch.calls import Buffer, Extent
from pipeline.stages.execute.cpu.pytorch.program import TorchProgram
from pipeline.stages.execute.vision.builder import PatchWeights, ProjectorMatrix, TowerBuilder


class TorchTower(TorchProgram, TowerBuilder):
    """The layers are those of an encoder."""

    def __init__(self, plan: ProgramPlan, patches: PatchInputs) -> None:
        super().__init__(plan)
        self._patches = patches
        self._projectors: list[list[tuple[Tensor, Tensor | None, str | None]]] = []

    def patches(self, weights: PatchWeights) -> None:
        self.embed(None)
        calls = self._calls
        pixels = Buffer(torch.from_numpy(self._patches.pixels), Extent.TOKENS)
        numbers = calls.buffer(pixels.storage.shape[1])
        calls.add(_centered, numbers, pixels)
        self._multiply(self._x, numbers, weights.linear)
        self._add(self._x, None, weights.norm)

    def project(self, matrices: tuple[ProjectorMatrix, ...], max_num_rows: int) -> None:
        self._projectors.append([(*self._linear(matrix.linear), matrix.activation) for matrix in matrices])

    def op_costs(self) -> FloatArray:
        return np.ones(len(self._calls.calls), np.float32)

    def run_ops(self, first: int, end: int) -> None:
        with torch.inference_mode():
            self._calls.run(first, end)

    def projected(self, rows: FloatArray, index: int = 0) -> FloatArray:
        ops = self._ops
        with torch.inference_mode():
            x = torch.from_numpy(rows).to(ops.dtype)
            for weight, bias, activation in self._projectors[index]:
                out = x.new_empty(len(x), len(weight))
                ops.linear(out, x, weight, bias)
                if activation is not None:
                    ops.activate(out, out.clone(), activation)
                x = out
            found: FloatArray = x.float().numpy()
            return found


def _centered(out: Tensor, pixels: Tensor) -> None:
    """out = pixels - CENTER, exact in bfloat16 too."""
    torch.sub(pixels.float(), CENTER, out=out) if out.dtype == torch.float32 else out.copy_(pixels.float() - CENTER)
