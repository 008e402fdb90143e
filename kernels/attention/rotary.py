"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864), the norm of queries and keys that some models have
before it, and the write of keys and values after it.

The layout is Hugging Face's: dimension i rotates with dimension i + D/2.
Shapes: T tokens, Q query heads, K key-value heads, D head_dim.
"""

import torch
from torch import Tensor

from pipeline.kernels.attention.hadamard import transform_heads
from pipeline.kernels.attention.kv_layout import LayerKV, quantize_heads
from pipeline.kernels.rms_norm import layer_norm, rms_norm
from pipeline.kernels.row_by_row import row_by_row
from pipeline.kernels.step_inputs import BLOCK_SIZE


def rotary_angles(
    cos: Tensor, sin: Tensor, positions: Tensor, frequencies: Tensor, magnitudes: Tensor | None = None
) -> None:
    """Cosines and sines for a step, the same for many layers. cos and sin [T, D] float32; positions [T] int64;
    frequencies [D/2] float32, radians a position; magnitudes [D/2], factors of both. The first half of `sin` carries
    the minus sign of the rotation."""
    half = len(frequencies)
    angles = torch.outer(positions.float(), frequencies)
    cos[:, :half] = cos[:, half:] = row_by_row(torch.cos, angles)
    angles = row_by_row(torch.sin, angles)
    sin[:, half:] = angles
    torch.neg(angles, out=sin[:, :half])
    if magnitudes is not None:
        for table in (cos, sin):
            table[:, :half] *= magnitudes
            table[:, half:] *= magnitudes


def given_angles(cos: Tensor, sin: Tensor, given_cos: Tensor, given_sin: Tensor) -> None:
    """The same of angles that are known: given_cos and given_sin [T, D/2] float32."""
    half = given_cos.shape[1]
    cos[:, :half] = cos[:, half:] = given_cos
    sin[:, half:] = given_sin
    torch.neg(given_sin, out=sin[:, :half])


def head_norm(qkv: Tensor, query_weight: Tensor, key_weight: Tensor, kv: LayerKV, eps: float) -> None:
    """An RMS norm of each head of queries and keys by itself, in place. qkv [T, (Q + 2K) * D], weights [D]; `kv` says
    how many heads are keys'."""
    _, _, num_kv_heads, head_dim = kv.keys.shape
    heads = qkv.view(len(qkv), -1, head_dim)
    queries, keys = heads[:, : -2 * num_kv_heads], heads[:, -2 * num_kv_heads : -num_kv_heads]
    rms_norm(queries, queries, query_weight, eps)
    rms_norm(keys, keys, key_weight, eps)


def qk_norm(
    qkv: Tensor, query_weight: Tensor, key_weight: Tensor, kv: LayerKV, eps: float, norm: str, kind: str
) -> None:
    """Norms of queries and keys, in place. qkv [T, (Q + 2K) * D]. `norm` is "rms" or "layer", `kind` is
    `ModelConfig.qk_norm_kind`: "head": each head by itself, with weights [D]; "each_head": the same with weights
    [Q * D] and [K * D]; "all": all heads together, with these weights."""
    _, _, num_kv_heads, head_dim = kv.keys.shape
    heads = qkv.view(len(qkv), -1, head_dim)
    parts = (heads[:, : -2 * num_kv_heads], query_weight), (heads[:, -2 * num_kv_heads : -num_kv_heads], key_weight)
    for part, weight in parts:
        x = part.flatten(1) if kind == "all" else part
        out = torch.empty_like(x)
        shaped = weight.view(-1, head_dim) if kind == "each_head" else weight
        if norm == "layer":
            layer_norm(out, x, shaped, None, eps)
        else:
            rms_norm(out, x, shaped, eps)
        part.copy_(out.view(part.shape))


def value_norm(qkv: Tensor, kv: LayerKV, eps: float) -> None:
    """An RMS norm without weights of each head of values by itself, in place. qkv [T, (Q + 2K) * D]."""
    _, _, num_kv_heads, head_dim = kv.keys.shape
    values = qkv.view(len(qkv), -1, head_dim)[:, -num_kv_heads:]
    rms_norm(values, values, torch.ones(head_dim), eps)


def turn_queries(queries: Tensor, cos: Tensor, sin: Tensor, kv: LayerKV, norm: Tensor | None, eps: float) -> None:
    """What `head_norm` and `rotary_write` do to queries, for a layer that has no keys and values of its own. queries
    [T, Q * D] in place, norm [D]."""
    head_dim = kv.keys.shape[3]
    heads = queries.view(len(queries), -1, head_dim)
    if norm is not None:
        rms_norm(heads, heads, norm, eps)
    turned = heads * cos[:, None]
    turned += heads.roll(head_dim // 2, -1) * sin[:, None]
    heads.copy_(turned if kv.key_scales is None else transform_heads(turned))


def rotary_write(qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, kv: LayerKV) -> None:
    """Rotate queries and keys by their angles, in float32, and subtract the center of keys. Writes queries in place,
    keys and values to the cache. If these have 8 bits, queries and keys go through a Hadamard transform. qkv [T, (Q +
    2K) * D], slots [T] int64."""
    _, _, num_kv_heads, head_dim = kv.keys.shape
    heads = qkv.view(len(qkv), -1, head_dim)
    turning = heads[:, :-num_kv_heads]
    turned = turning * cos[:, None]
    turned += turning.roll(head_dim // 2, -1) * sin[:, None]
    num_blocks = len(kv.keys)
    if kv.center is not None:
        turned[:, -num_kv_heads:] -= kv.center
    if kv.key_scales is not None:
        turned = transform_heads(turned)
    heads[:, : -2 * num_kv_heads] = turned[:, :-num_kv_heads]
    if kv.key_scales is not None and kv.value_scales is not None:
        index = slots // BLOCK_SIZE, slots % BLOCK_SIZE
        kv.keys[index], kv.key_scales[index] = quantize_heads(turned[:, -num_kv_heads:])
        kv.values[index], kv.value_scales[index] = quantize_heads(heads[:, -num_kv_heads:])
        return
    keys = turned[:, -num_kv_heads:].to(kv.keys.dtype)
    if not kv.keys.is_contiguous():
        index = slots // BLOCK_SIZE, slots % BLOCK_SIZE
        kv.keys[index], kv.values[index] = keys, heads[:, -num_kv_heads:]
        return
    kv.keys.view(num_blocks * BLOCK_SIZE, num_kv_heads, head_dim).index_copy_(0, slots, keys)
    kv.values.view(num_blocks * BLOCK_SIZE, num_kv_heads, head_dim).index_copy_(0, slots, heads[:, -num_kv_heads:])


def scale_queries(qkv: Tensor, positions: Tensor, kv: LayerKV, beta: float, period: int) -> None:
    """Multiply queries at position p with 1 + beta * log(1 + floor(p / period)), in place (Llama 4's attention
    temperature). qkv [T, (Q + 2K) * D], positions [T] int64."""
    _, _, num_kv_heads, head_dim = kv.keys.shape
    factors = 1 + beta * row_by_row(torch.log1p, torch.div(positions, period, rounding_mode="floor").float()[:, None])
    qkv[:, : -2 * num_kv_heads * head_dim] *= factors.to(qkv.dtype)


def rotary_reference(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """Rotate `x` [T, heads, D] in float64, each pair of dimensions as a complex number."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    angles = torch.outer(positions.double(), frequencies.double())[:, None]
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1)
