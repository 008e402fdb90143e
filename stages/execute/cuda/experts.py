"""The mixtures of experts of a model on a GPU: their weights, and the launches of a layer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.kernels.matrix import as_matrix
from pipeline.kernels.triton import experts as kernels
from pipeline.kernels.triton.gemm.device_matrix import DeviceMatrix, Quantization
from pipeline.runtime.model_folder import ModelConfig
from pipeline.stages.execute.cpu.program import Linear


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """The matrices of all experts of a layer, an expert's rows below those of the one before."""

    gate: DeviceMatrix
    up: DeviceMatrix
    down: DeviceMatrix

    @staticmethod
    def of(
        gate_up: Linear, down: Linear, dtype: torch.dtype, where: torch.device, quantization: Quantization | None
    ) -> "ExpertMatrices":
        parts = gate_up.matrices[::2], gate_up.matrices[1::2], down.matrices
        stacked = [
            DeviceMatrix.of([as_matrix(matrix) for matrix in part], dtype, where, quantization) for part in parts
        ]
        return ExpertMatrices(*stacked)

    @property
    def all(self) -> tuple[DeviceMatrix, ...]:
        return self.gate, self.up, self.down


class ExpertMemory:
    """What is between the launches of a layer; all layers share it."""

    def __init__(self, config: ModelConfig, max_num_tokens: int, dtype: torch.dtype, where: torch.device) -> None:
        experts = config.experts
        assert experts is not None
        self._experts, num = experts, max_num_tokens * experts.num_per_token
        self._chosen = torch.zeros(max_num_tokens, experts.num_per_token, dtype=torch.int32, device=where)
        self._weights = torch.zeros(self._chosen.shape, dtype=torch.float32, device=where)
        self._places = torch.zeros(experts.num, max_num_tokens, dtype=torch.int32, device=where)
        self._counts = torch.zeros(experts.num, dtype=torch.int32, device=where)
        self._inner = torch.zeros(num, experts.intermediate_size, dtype=dtype, device=where)
        self._parts = torch.zeros(num, config.hidden_size, dtype=torch.float32, device=where)
        self._out = torch.zeros(max_num_tokens, config.hidden_size, dtype=torch.float32, device=where)

    def result(self, num_tokens: int) -> Tensor:
        """The result of the last layer for this many tokens, as one split-K partial: [1, M, H]."""
        return self._out[:num_tokens].unsqueeze(0)

    def compute(self, x: Tensor, logits: Tensor, matrices: ExpertMatrices, shared: Tensor | None) -> Tensor:
        """Launch a layer. x [M, H], logits [P, M, E or more] of the router, shared [P, M, H] or None. Returns the
        `result`."""
        experts, num = self._experts, len(x)
        count = experts.num_per_token
        chosen, weights, parts = self._chosen[:num], self._weights[:num], self._parts[: num * count]
        inner, order = self._inner[: num * count], (self._places, self._counts)
        kernels.route(chosen, weights, logits, experts.num, experts.scale, normalized=experts.normalized)
        kernels.sort(*order, chosen)
        kernels.gate_up(inner, x, *order, matrices.gate, matrices.up, count)
        kernels.down(parts, inner, *order, matrices.down, num)
        gates = logits if experts.shared_gate else None
        kernels.combine(self._out[:num], parts, weights, shared, gates)
        return self.result(num)
