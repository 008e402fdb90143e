"""Grouped-query self-attention and, in some models, rotary embedding, biases, norms of queries and keys, windows.

The rows of queries and keys are loaded in the order that the kernels rotate (stages/execute/layers/rope.py).
"""

import math
import zlib

import numpy as np

from pipeline.kernels.sampling.logprob_inputs import FloatArray
from pipeline.kernels.step_inputs import LongArray
from pipeline.kernels.stored_matrix import StoredMatrix
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.layers.norm import norm_weights, post_norm_weights
from pipeline.stages.execute.layers.rope import head_order
from pipeline.stages.execute.program import AnyMatrix, AttentionWeights, HeadNorms, Linear
from pipeline.stages.execute.weights import Weights


def attention_weights(
    config: ModelConfig, weights: Weights, index: int, num_inputs: int | None = None
) -> AttentionWeights:
    """The weights of one layer, by Llama's names. Queries, keys and values are stacked. Without `num_inputs`, they are
    made of hidden states."""
    layer, heads, source = f"model.layers.{index}", config.heads_of(index), config.kv_source(index)
    hidden, queries, keys = config.hidden_size, heads.query_size, heads.kv_size
    kinds = "q" if source != index else "qkk" if config.values_are_keys(index) else "qkv"
    names = [f"{layer}.self_attn.{name}_proj" for name in kinds]
    rows = [queries, keys, keys][: len(kinds)]
    qkv = weights.matrices([f"{name}.weight" for name in names], rows, num_inputs or hidden)
    out = weights.matrix(f"{layer}.self_attn.o_proj.weight", hidden, queries)
    qkv_bias = weights.join_vectors([f"{name}.bias" for name in names], rows) if config.qkv_bias else None
    out_bias = weights.vector(f"{layer}.self_attn.o_proj.bias", hidden) if config.out_bias else None
    head_norms = _head_norms(config, weights, index)
    if (order := head_order(config, config.rope_of(index))) is not None:
        orders = head_indices(order, queries), head_indices(order, keys)
        qkv = tuple(_take_rows(matrix, each) for matrix, each in zip(qkv, orders, strict=False)) + qkv[2:]
        if qkv_bias is not None:
            every = np.concatenate([orders[0], queries + orders[1], np.arange(queries + keys, queries + 2 * keys)])
            qkv_bias = qkv_bias[every]
        if head_norms is not None and head_norms.key is not None:
            taken = [weight[head_indices(order, len(weight))] for weight in (head_norms.query, head_norms.key)]
            head_norms = HeadNorms(*taken)
    gate = None
    if config.attention_gate:
        num = heads.num if config.gate_per_head else queries
        has_bias = config.qkv_bias and not config.gate_per_head
        bias = weights.vector(f"{layer}.self_attn.gate_proj.bias", num) if has_bias else None
        gate = Linear((weights.matrix(f"{layer}.self_attn.gate_proj.weight", num, hidden),), bias)
    has_norm = config.pre_norms and not (config.skips_first_norm and index == 0)
    return AttentionWeights(
        norm=norm_weights(config, weights, f"{layer}.input_layernorm") if has_norm else None,
        qkv=Linear(qkv, qkv_bias),
        out=Linear((out,), out_bias),
        heads=heads,
        source=None if source == index else source,
        value_norm=config.value_norm,
        head_norms=head_norms,
        window=config.window_of(index),
        window_after=config.window_after_of(index),
        rope=config.rope_of(index),
        sinks=weights.vector(f"{layer}.self_attn.sinks", config.num_heads) if config.sinks else None,
        biases=_distance_biases(config, weights) if config.distance_buckets else None,
        gate=gate,
        post_norm=post_norm_weights(config, weights, f"{layer}.self_attn_post_norm") if config.post_norms else None,
        residual_norm=norm_weights(config, weights, f"{layer}.self_attn_residual_norm")
        if config.residual_norms
        else None,
    )


def _head_norms(config: ModelConfig, weights: Weights, index: int) -> HeadNorms | None:
    if not config.qk_norm:
        return None
    heads, layer = config.heads_of(index), f"model.layers.{index}"
    sizes = heads.dim, heads.dim
    if config.qk_norm_kind != "head":
        sizes = heads.query_size, heads.kv_size
    kinds = "qk" if config.kv_source(index) == index else "q"
    if not config.qk_norm_weights:
        return HeadNorms(*(np.ones(size, np.float32) for size in sizes[: len(kinds)]), *(2 - len(kinds)) * [None])
    found = [
        weights.vector(f"{layer}.self_attn.{name}_norm.weight", size) for name, size in zip(kinds, sizes, strict=False)
    ]
    if config.norm_offset:
        found = [weight + config.norm_offset for weight in found]
    return HeadNorms(found[0], found[1] if len(found) > 1 else None)


MAX_DISTANCE = 128
"""From it on, distances share the last bucket."""


def _distance_biases(config: ModelConfig, weights: Weights) -> FloatArray:
    """What is added to scores, [num_heads, 2 * MAX_DISTANCE + 1], by the distance from the query to the key."""
    table = weights.floats("model.distance_bias.weight", (config.distance_buckets, config.num_heads))
    biases: FloatArray = np.ascontiguousarray(table[distance_buckets(config.distance_buckets)].T)
    return biases


def distance_buckets(num: int) -> LongArray:
    """The bucket of each distance from -MAX_DISTANCE to MAX_DISTANCE: half of them for keys before the query and half
    for keys after it, of each half one for each small distance, and the others for ranges that grow like a logarithm
    (T5: Raffel et al., 2020, arXiv:1910.10683). In float32, as in transformers."""
    half = num // 2
    distances = np.arange(-MAX_DISTANCE, MAX_DISTANCE + 1)
    sizes, exact = np.abs(distances), half // 2
    logarithms = np.log(np.maximum(sizes, 1).astype(np.float32) / np.float32(exact))
    ranges = logarithms / np.float32(math.log(MAX_DISTANCE / exact)) * np.float32(half - exact)
    large = np.minimum(exact + ranges.astype(np.int64), half - 1)
    buckets: LongArray = np.where(sizes < exact, sizes, large) + half * (distances > 0)
    return buckets


def head_indices(order: LongArray, size: int) -> LongArray:
    """The order of the dimensions of every head, for `size` rows."""
    head_dim = len(order)
    indices: LongArray = (np.arange(size // head_dim)[:, None] * head_dim + order).reshape(-1)
    return indices


def _take_rows(matrix: AnyMatrix, order: LongArray) -> AnyMatrix:
    """Row i of the result is row order[i]."""
    if isinstance(matrix, StoredMatrix):
        # The order is part of the name, under which packed weights are kept.
        name = f"{matrix.name}, rows {zlib.crc32(order.tobytes()):08x}" if matrix.name else ""
        return StoredMatrix(matrix.format, matrix.data[order], matrix.num_rows, matrix.num_columns, name)
    import torch

    return matrix.take_rows(torch.from_numpy(order))
