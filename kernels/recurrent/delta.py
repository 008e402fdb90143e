"""The gated delta rule (Yang et al., 2024, arXiv:2412.06464), in float32: a linear attention whose state has one size
for any length.

    q, k, v, z, b, a ─ convolution, SiLU, norms ─► q, k, v, decay, beta ─ S = decay S + k (beta (v - S^T k))^T ─►
    o = S^T q ─► rms(o) w silu(z)

Tokens are computed one after the other, so a token has the same bits in any chunk and beside any rows.

Shapes: T tokens, R entries, V value heads, K key heads, C channels (queries, keys and values).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from pipeline.kernels.recurrent.delta_shape import SLICE, TAPS, DeltaShape
from pipeline.kernels.row_by_row import row_by_row
from pipeline.kernels.step_inputs import StepInputs

L2_EPS = 1e-6
"""Of the norms of queries and keys, inside the root."""


class DeltaVectors(NamedTuple):
    """The weights of a layer that are no matrices, float32."""

    conv: Tensor
    """[TAPS, C]; the last one is that of the token itself"""
    rates: Tensor
    """[V]: -exp(A_log)"""
    dt_bias: Tensor
    """[V]"""
    norm: Tensor
    """[value_dim]"""


@dataclass(frozen=True, slots=True)
class DeltaOptions:
    """How a layer computes."""

    shape: DeltaShape
    eps: float
    """Of the norm."""
    beta: float = 1.0
    """Factor of the sigmoid of b."""
    layer: int = 0
    """Floats of a slot before those of this layer."""


def delta_rule(
    out: Tensor, x: Tensor, slots: Tensor, inputs: StepInputs, vectors: DeltaVectors, options: DeltaOptions
) -> None:
    """out [T, V * value_dim] of any dtype, x [T, options.shape.inputs] float32. Each entry of the step reads one of the
    `slots` (or none: zeros) and writes one, see `StepInputs.state_reads`."""
    shape = options.shape
    for entry in range(inputs.num_rows):
        first, count = int(inputs.offsets[entry]), int(inputs.counts[entry])
        read, write = int(inputs.state_reads[entry]), int(inputs.state_writes[entry])
        state = slots.new_zeros(shape.slot)
        if read >= 0:
            state.copy_(slots[read, options.layer : options.layer + shape.slot])
        out[first : first + count] = _row(x[first : first + count], state, vectors, options)
        slots[write, options.layer : options.layer + shape.slot] = state


def _row(x: Tensor, state: Tensor, vectors: DeltaVectors, options: DeltaOptions) -> Tensor:
    """The result of some tokens of one row, [N, V * value_dim], whose `state` changes."""
    shape, count = options.shape, len(x)
    heads, size = shape.value_heads, shape.value_dim
    matrix = state[: shape.state].view(heads, -1, shape.key_dim, SLICE)
    last = state[shape.state :].view(TAPS - 1, shape.channels)
    channels, z, b, a = torch.split(x, [shape.channels, shape.values, heads, heads], 1)
    history = torch.cat([last, channels])
    last.copy_(history[count:])
    mixed = sum((history[i : i + count] * vectors.conv[i] for i in range(TAPS)), torch.zeros_like(channels))
    mixed = row_by_row(_silu, mixed)
    queries, keys, values = torch.split(mixed, [shape.keys, shape.keys, shape.values], 1)
    queries, keys = (
        _for_values(l2_norm(part.reshape(count, shape.key_heads, shape.key_dim)), shape) for part in (queries, keys)
    )
    queries = queries / shape.key_dim**0.5
    decays = row_by_row(lambda row: (vectors.rates * softplus(row + vectors.dt_bias)).exp(), a)
    betas = row_by_row(torch.sigmoid, b) * options.beta
    values = values.reshape(count, heads, -1, SLICE)
    made = torch.empty_like(values)
    for i in range(count):
        key, query = keys[i, :, None, :, None], queries[i, :, None, :, None]
        matrix *= decays[i, :, None, None, None]
        change = (values[i] - (matrix * key).sum(2)) * betas[i, :, None, None]
        matrix += key * change[:, :, None]
        made[i] = (matrix * query).sum(2)
    made = made.reshape(count, heads, size)
    made = made * torch.rsqrt(made.square().mean(-1, keepdim=True).add_(options.eps)) * vectors.norm
    return made.reshape(count, -1) * row_by_row(_silu, z)


def _for_values(x: Tensor, shape: DeltaShape) -> Tensor:
    """The key heads [N, K, key_dim] of each value head, [N, V, key_dim]."""
    ratio = shape.value_heads // shape.key_heads
    return x.repeat(1, ratio, 1) if shape.tiled else x.repeat_interleave(ratio, 1)


def l2_norm(x: Tensor) -> Tensor:
    """Each head by itself, as in transformers."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def _silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def delta_reference(x: Tensor, vectors: DeltaVectors, options: DeltaOptions) -> tuple[Tensor, Tensor, Tensor]:
    """The formula in float64, of a row without a state before: the result [N, V * value_dim], S [V, key_dim, value_dim]
    and the last inputs of the convolution [TAPS - 1, C]."""
    shape, num = options.shape, len(x)
    heads = shape.value_heads
    conv, rates, dt_bias, norm = (vector.double() for vector in vectors)
    channels, z, b, a = torch.split(x.double(), [shape.channels, shape.values, heads, heads], 1)
    history = torch.cat([channels.new_zeros(TAPS - 1, shape.channels), channels])
    mixed = sum(history[i : i + num] * conv[i] for i in range(TAPS))
    assert isinstance(mixed, Tensor)
    mixed = mixed * torch.sigmoid(mixed)
    queries, keys, values = torch.split(mixed, [shape.keys, shape.keys, shape.values], 1)
    queries, keys = (_for_values(l2_norm(part.view(num, shape.key_heads, -1)), shape) for part in (queries, keys))
    values = values.view(num, heads, -1)
    state = x.new_zeros(heads, shape.key_dim, shape.value_dim, dtype=torch.float64)
    made = torch.zeros_like(values)
    for i in range(num):
        state = state * (rates * softplus(a[i] + dt_bias)).exp()[:, None, None]
        change = (values[i] - torch.einsum("hkv,hk->hv", state, keys[i])) * (torch.sigmoid(b[i]) * options.beta)[
            :, None
        ]
        state = state + torch.einsum("hk,hv->hkv", keys[i], change)
        made[i] = torch.einsum("hkv,hk->hv", state, queries[i] / shape.key_dim**0.5)
    made = made / torch.sqrt(made.square().mean(-1, keepdim=True) + options.eps) * norm
    return made.reshape(num, -1) * (z * torch.sigmoid(z)), state, history[num:]
