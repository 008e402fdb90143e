"""Rotary embedding, the norm of heads that some models have before it, and the write of keys and values, in one launch
over tokens x heads.

It sums the split-K partials of the linear layer, rotates each head in float32 and rounds once. The two halves of a head
are two tiles, so that accesses are contiguous and threads exchange nothing. Padding tokens, which have no slot, are not
read.

Shapes: P split-K partials, T tokens, Q query heads, K key-value heads, D head_dim, L max_model_len.
"""

import triton
import triton.language as tl
from torch import Tensor

from pipeline.kernels.step_inputs import BLOCK_SIZE
from pipeline.kernels.triton.attention.hadamard import transform_heads
from pipeline.kernels.triton.kv_cache import as_scales, head_dim_of, quantize, scale_bytes_of, shape_of
from pipeline.kernels.triton.launch import next_power_of_2
from pipeline.kernels.triton.rows import StepArrays

HeadNorms = tuple[Tensor, Tensor, float]
"""Weights [D] of the query and key norms, and eps."""
QueryGrowth = tuple[float, int]
"""b and p in 1 + b * log(1 + floor(position / p)), a factor of rotated queries."""
NO_GROWTH: QueryGrowth = (0.0, 1)


def rotary_write(
    queries: Tensor,
    split_k_partials: Tensor,
    cos: Tensor,
    sin: Tensor,
    step: StepArrays,
    keys: Tensor,
    values: Tensor,
    head_norms: HeadNorms | None,
    center: Tensor | None = None,
    growth: QueryGrowth = NO_GROWTH,
) -> None:
    """Sum `split_k_partials` [P, T, (Q + 2K) * D], norm and rotate queries and keys by the angles of `step.positions`,
    and write queries to `queries` [T, Q * D], keys and values [num_blocks, K, BLOCK_SIZE, D], or in 8 bits
    (kv_cache.py), to `step.slots`. With keys in 8 bits, `center` [K, D] float32 is subtracted from
    keys, and queries and keys go through a Hadamard transform.

    cos and sin [L, D/2] float32. Tokens with slot -1 write nothing.
    """
    num_split_k_partials, num_tokens, width = split_k_partials.shape
    num_kv_heads, head_dim = keys.shape[1], head_dim_of(keys)
    num_heads = width // head_dim - 2 * num_kv_heads
    assert keys.shape == values.shape == shape_of(len(keys), num_kv_heads, head_dim, keys.dtype)
    assert num_tokens == step.num_tokens
    assert queries.shape == (num_tokens, num_heads * head_dim) and head_dim % 2 == 0
    assert cos.shape[1] == sin.shape[1] == head_dim // 2
    assert all(tensor.is_contiguous() for tensor in (queries, split_k_partials, cos, sin, keys, values))
    half = next_power_of_2(head_dim // 2)
    total_heads = num_heads + 2 * num_kv_heads
    # Up to four warps, with 16 bytes per thread and half of a head.
    heads = min(next_power_of_2(total_heads), max(1, 1024 // half))
    query_norm, key_norm, eps = head_norms or (cos, cos, 0.0)
    _rotary_kernel[(num_tokens, -(-total_heads // heads))](
        queries,
        split_k_partials,
        split_k_partials.stride(0),
        cos,
        sin,
        step.positions,
        step.slots,
        keys,
        values,
        as_scales(keys),
        as_scales(values),
        query_norm,
        key_norm,
        cos if center is None else center,
        NUM_PARTIALS=num_split_k_partials,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        HEADS=heads,
        BLOCK_SIZE=BLOCK_SIZE,
        SCALE_BYTES=scale_bytes_of(keys),
        NORMED=head_norms is not None,
        CENTERED=center is not None,
        EPS=eps,
        GROWTH=growth[0],
        PERIOD=growth[1],
        num_warps=4,
    )


@triton.jit
def query_factor(position, GROWTH: tl.constexpr, PERIOD: tl.constexpr):
    """The factor of queries at a position, see `QueryGrowth`."""
    return 1.0 + GROWTH * tl.log(1.0 + (position // PERIOD).to(tl.float32))


@triton.jit(do_not_specialize=["part_stride"])
def _rotary_kernel(
    queries,
    split_k_partials,
    part_stride,
    cos,
    sin,
    positions,
    slots,
    keys,
    values,
    key_scales,
    value_scales,
    query_norm,
    key_norm,
    center,
    NUM_PARTIALS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    NORMED: tl.constexpr,
    CENTERED: tl.constexpr,
    EPS: tl.constexpr,
    GROWTH: tl.constexpr,
    PERIOD: tl.constexpr,
):
    token = tl.program_id(0)
    slot = tl.load(slots + token)
    if slot >= 0:
        half: tl.constexpr = HEAD_DIM // 2
        heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        dims = tl.arange(0, HALF)
        inside = dims < half
        mask = (heads < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & inside[None, :]
        at = token.to(tl.int64) * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM) + heads * HEAD_DIM
        at = at[:, None] + dims[None, :]
        # A multiple of 16 bytes, which the compiler can't know of a kernel argument.
        step = tl.multiple_of(part_stride.to(tl.int64), 8)
        low = tl.zeros([HEADS, HALF], tl.float32)
        high = tl.zeros([HEADS, HALF], tl.float32)
        for part in tl.static_range(NUM_PARTIALS):
            low += tl.load(split_k_partials + part * step + at, mask=mask, other=0.0).to(tl.float32)
            high += tl.load(split_k_partials + part * step + at + half, mask=mask, other=0.0).to(tl.float32)

        is_query = heads < NUM_HEADS
        is_value = heads >= NUM_HEADS + NUM_KV_HEADS
        if NORMED:
            scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / HEAD_DIM + EPS)[:, None]
            low_norm = tl.where(
                is_query[:, None],
                tl.load(query_norm + dims, mask=inside, other=0.0).to(tl.float32)[None, :],
                tl.load(key_norm + dims, mask=inside, other=0.0).to(tl.float32)[None, :],
            )
            high_norm = tl.where(
                is_query[:, None],
                tl.load(query_norm + half + dims, mask=inside, other=0.0).to(tl.float32)[None, :],
                tl.load(key_norm + half + dims, mask=inside, other=0.0).to(tl.float32)[None, :],
            )
            low = tl.where(is_value[:, None], low, low * scale * low_norm)
            high = tl.where(is_value[:, None], high, high * scale * high_norm)

        angle = tl.load(positions + token).to(tl.int64) * half + dims
        cosine = tl.load(cos + angle, mask=inside, other=0.0)[None, :]
        sine = tl.load(sin + angle, mask=inside, other=0.0)[None, :]
        turned_low = tl.where(is_value[:, None], low, low * cosine - high * sine)
        turned_high = tl.where(is_value[:, None], high, high * cosine + low * sine)
        if SCALE_BYTES > 0:
            if CENTERED:
                is_key = mask & (~is_query & ~is_value)[:, None]
                to_center = center + (heads - NUM_HEADS)[:, None] * HEAD_DIM + dims[None, :]
                turned_low -= tl.load(to_center, mask=is_key, other=0.0)
                turned_high -= tl.load(to_center + half, mask=is_key, other=0.0)
            size: tl.constexpr = HEAD_DIM & -HEAD_DIM
            spread_low = transform_heads(turned_low, turned_high, False, HEADS, HALF, size)
            spread_high = transform_heads(turned_high, turned_low, True, HEADS, HALF, size)
            turned_low = tl.where(is_value[:, None], turned_low, spread_low)
            turned_high = tl.where(is_value[:, None], turned_high, spread_high)

        if GROWTH != 0:
            factor = tl.where(is_query, query_factor(tl.load(positions + token), GROWTH, PERIOD), 1.0)[:, None]
            turned_low *= factor
            turned_high *= factor
        to_query = token.to(tl.int64) * (NUM_HEADS * HEAD_DIM) + heads * HEAD_DIM
        to_query = queries + to_query[:, None] + dims[None, :]
        dtype: tl.constexpr = queries.dtype.element_ty
        tl.store(to_query, turned_low.to(dtype), mask=mask & is_query[:, None])
        tl.store(to_query + half, turned_high.to(dtype), mask=mask & is_query[:, None])

        kv_head = tl.where(is_value, heads - NUM_KV_HEADS, heads) - NUM_HEADS
        to_head = (slot // BLOCK_SIZE * NUM_KV_HEADS + kv_head) * (BLOCK_SIZE * (HEAD_DIM + SCALE_BYTES))
        to_cache = (to_head + slot % BLOCK_SIZE * HEAD_DIM)[:, None] + dims[None, :]
        cache_dtype: tl.constexpr = keys.dtype.element_ty
        is_key_head = ~is_query & ~is_value
        is_key = mask & is_key_head[:, None]
        if SCALE_BYTES > 0:
            tops = tl.maximum(tl.max(tl.abs(turned_low), 1), tl.max(tl.abs(turned_high), 1))
            sums = tl.sum(turned_low * 0.0, 1) + tl.sum(turned_high * 0.0, 1)
            turned_low, scales = quantize(turned_low, tops, sums)
            turned_high, scales = quantize(turned_high, tops, sums)
            to_scale = to_head // 2 + BLOCK_SIZE * HEAD_DIM // 2 + slot % BLOCK_SIZE
            is_head = heads < NUM_HEADS + 2 * NUM_KV_HEADS
            scales = scales.to(tl.bfloat16)
            tl.store(key_scales + to_scale, scales, mask=is_head & is_key_head)
            tl.store(value_scales + to_scale, scales, mask=is_head & is_value)
        tl.store(keys + to_cache, turned_low.to(cache_dtype), mask=is_key)
        tl.store(keys + to_cache + half, turned_high.to(cache_dtype), mask=is_key)
        tl.store(values + to_cache, turned_low.to(cache_dtype), mask=mask & is_value[:, None])
        tl.store(values + to_cache + half, turned_high.to(cache_dtype), mask=mask & is_value[:, None])
