"""A mixture of experts: a router, the experts' matrices, and in some models an expert for every token."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pipeline import torch_needed
from pipeline.kernels.stored_matrix import StoredMatrix
from pipeline.runtime.model.model_config import EXPERTS, ModelConfig
from pipeline.stages.execute.layers.mlp import mlp_weights
from pipeline.stages.execute.layers.norm import norm_weights, post_norm_weights
from pipeline.stages.execute.program import AnyMatrix, ExpertsWeights, Linear, Norm
from pipeline.stages.execute.weights import DTYPES, Weights, converted


def experts_weights(config: ModelConfig, weights: Weights, index: int) -> ExpertsWeights:
    """The weights of one layer. The matrices of all experts are stacked, gate and up of each together."""
    experts = config.experts
    assert experts is not None
    layer, hidden, inner = f"model.layers.{index}", config.hidden_size, experts.intermediate_size
    router_name = f"{layer}.mlp.router"
    router = [weights.matrix(f"{router_name}.weight", experts.num, hidden)]
    router_bias = weights.vector(f"{router_name}.bias", experts.num) if experts.router_bias else None
    before = [f"{layer}.{EXPERTS}{number}." for number in range(experts.num)]
    inputs = ("gate_proj", "up_proj") if config.gated else ("up_proj",)
    first = [f"{prefix}{name}" for prefix in before for name in inputs]
    last = [f"{prefix}down_proj" for prefix in before]
    shared = None
    if size := experts.shared_intermediate_size:
        names = [f"{layer}.mlp.shared_expert.{name}.weight" for name in inputs]
        down = weights.matrix(f"{layer}.mlp.shared_expert.down_proj.weight", hidden, size)
        shared = Linear(weights.matrices(names, [size] * len(names), hidden)), Linear((down,))
    if experts.shared_gate:
        router.append(weights.matrix(f"{layer}.mlp.shared_expert_gate.weight", 1, hidden))
        router_bias = None if router_bias is None else np.append(np.asarray(router_bias), np.float32(0))
    made = ExpertsWeights(
        norm=norm_weights(config, weights, f"{layer}.post_attention_layernorm")
        if config.has_pre_norms(index)
        else None,
        router=Linear(_in_one_format(router), router_bias),
        selection_bias=weights.vector(f"{layer}.mlp.selection.bias", experts.num) if experts.selection_bias else None,
        gate_up=_stacked(weights, first, inner, hidden, len(inputs), experts.bias),
        down=_stacked(weights, last, hidden, inner, 1, experts.bias),
        shared=shared,
        post_norm=post_norm_weights(config, weights, f"{layer}.mlp_post_norm")
        if config.has_post_norms(index)
        else None,
        factors=weights.vector(f"{layer}.mlp.expert_factors.weight", experts.num) if experts.factors else None,
        router_norm=_router_norm(config, weights, layer) if experts.router_norm else None,
    )
    return _beside_dense(made, config, weights, index) if experts.beside_dense else made


def _router_norm(config: ModelConfig, weights: Weights, layer: str) -> Norm:
    norm = norm_weights(config, weights, f"{layer}.mlp.router_norm")
    return replace(norm, weight=norm.weight * config.hidden_size**-0.5)


def _beside_dense(made: ExpertsWeights, config: ModelConfig, weights: Weights, index: int) -> ExpertsWeights:
    """The same with the dense layer, whose norm before it is in `made`, as is that of the sum."""
    dense, layer = mlp_weights(config, weights, index), f"model.layers.{index}.mlp"
    names = "experts_norm", "experts_post_norm", "dense_post_norm"
    norm, post_norm, dense_post_norm = (norm_weights(config, weights, f"{layer}.{name}") for name in names)
    return replace(
        made,
        norm=norm,
        post_norm=post_norm,
        dense=replace(dense, post_norm=dense_post_norm, residual_scale=1.0),
        sum_norm=dense.post_norm,
        residual_scale=dense.residual_scale,
    )


def _stacked(weights: Weights, names: list[str], rows: int, columns: int, group: int, has_bias: bool) -> Linear:
    """The matrices of all experts, `group` of each, which have one format for all experts."""
    sizes = [rows] * len(names)
    matrices = weights.matrices([f"{name}.weight" for name in names], sizes, columns)
    bias = weights.join_vectors([f"{name}.bias" for name in names], sizes) if has_bias else None
    parts = [_in_one_format(matrices[part::group]) for part in range(group)]
    return Linear(tuple(matrix for one in zip(*parts, strict=True) for matrix in one), bias)


def _in_one_format(matrices: Sequence[AnyMatrix]) -> tuple[AnyMatrix, ...]:
    """The matrices, or all of them in bfloat16 if their formats differ: an op reads them as one matrix."""
    has_one = len({matrix.format for matrix in matrices}) == 1
    return tuple(matrices) if has_one else tuple(_as_bf16(matrix) for matrix in matrices)


def _as_bf16(matrix: AnyMatrix) -> AnyMatrix:
    if isinstance(matrix, StoredMatrix) and matrix.format in DTYPES:
        data = converted(matrix.data, DTYPES[matrix.format], "bf16")
        return StoredMatrix("bf16", data, matrix.num_rows, matrix.num_columns)
    torch_needed.require(f"a mixture of experts with matrices in several formats ({matrix.format} is one)")
    import torch

    from pipeline.kernels.matrix import Matrix, as_matrix

    values = as_matrix(matrix).dequantize(torch.bfloat16)
    return Matrix("bf16", values, matrix.num_rows, matrix.num_columns)
