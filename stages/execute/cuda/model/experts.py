"""The mixtures of experts of a model on a GPU: their weights, and the launches of a layer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.kernels.experts import ExpertActivation
from pipeline.kernels.matrix import as_matrix, as_tensor
from pipeline.kernels.triton import experts as kernels
from pipeline.kernels.triton.experts import ExpertLinear, Order
from pipeline.kernels.triton.gemm.device_matrix import DeviceMatrix, Quantization
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.layers.route_options import route_options
from pipeline.stages.execute.program import ExpertsWeights, Linear


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """The matrices of all experts of a layer, an expert's rows below those of the one before."""

    gate: ExpertLinear
    """The only one before the activation if the layer is not gated."""
    up: ExpertLinear | None
    down: ExpertLinear
    selection_bias: Tensor | None
    """[E] float32"""

    @staticmethod
    def of(
        weights: ExpertsWeights,
        config: ModelConfig,
        dtype: torch.dtype,
        where: torch.device,
        quantization: Quantization | None,
    ) -> "ExpertMatrices":
        assert config.experts is not None
        num, num_parts = config.experts.num, 2 if config.gated else 1

        def stacked(linear: Linear, part: int, num_parts: int) -> ExpertLinear:
            """Part `part` of `num_parts` of each expert."""
            matrices = [as_matrix(matrix) for matrix in linear.matrices[part::num_parts]]
            bias = None
            if linear.bias is not None:
                biases = as_tensor(linear.bias).float().view(num, num_parts, -1)
                bias = biases[:, part].flatten().to(where)
            return ExpertLinear(DeviceMatrix.of(matrices, dtype, where, quantization, linear.group), bias)

        bias = weights.selection_bias
        return ExpertMatrices(
            stacked(weights.gate_up, 0, num_parts),
            stacked(weights.gate_up, 1, num_parts) if config.gated else None,
            stacked(weights.down, 0, 1),
            None if bias is None else as_tensor(bias).to(where, torch.float32),
        )

    @property
    def all(self) -> list[DeviceMatrix]:
        return [linear.matrix for linear in (self.gate, self.up, self.down) if linear is not None]


class ExpertMemory:
    """What is between the launches of a layer; all layers share it."""

    def __init__(self, config: ModelConfig, max_num_tokens: int, dtype: torch.dtype, where: torch.device) -> None:
        experts = config.experts
        assert experts is not None
        self._experts, num = experts, max_num_tokens * experts.num_per_token
        self._route_form = route_options(experts)
        self._form = ExpertActivation(config.activation, config.gated, config.swiglu_alpha, config.swiglu_limit)
        self._chosen = torch.zeros(max_num_tokens, experts.num_per_token, dtype=torch.int32, device=where)
        self._weights = torch.zeros(self._chosen.shape, dtype=torch.float32, device=where)
        choice_indices = torch.zeros(experts.num, max_num_tokens, dtype=torch.int32, device=where)
        self._order = Order(choice_indices, torch.zeros(experts.num, dtype=torch.int32, device=where))
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
        width, order = matrices.down.matrix.num_columns, self._order
        inner = self._inner.view(-1)[: num * count * width].view(num * count, width)  # a rank has a part
        kernels.route(chosen, weights, logits, self._route_form, matrices.selection_bias)
        kernels.sort(order, chosen)
        kernels.gate_up(inner, x, order, matrices.gate, matrices.up, count, self._form)
        kernels.down(parts, inner, order, matrices.down, num)
        gates = logits if experts.shared_gate else None
        kernels.combine(self._out[:num], parts, weights, shared, gates)
        return self.result(num)
