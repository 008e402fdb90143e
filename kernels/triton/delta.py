"""The gated delta rule (kernels/recurrent/delta.py): states stay in registers for all tokens of an entry.

A program has a slice of a head's state of an entry, whose columns need no others. So it computes the convolution of its
head's queries and keys itself, which the other slices compute too. The last inputs of the convolution are kept by a
launch of their own: programs that read them may not have begun when others are done.

Shapes: N entries, T tokens, V value heads, C channels, as in kernels/recurrent/delta.py.
"""

import triton
import triton.language as tl
from torch import Tensor

from pipeline.kernels.recurrent.delta import L2_EPS, DeltaOptions, DeltaVectors
from pipeline.kernels.recurrent.delta_shape import SLICE, TAPS
from pipeline.kernels.triton.activations import silu
from pipeline.kernels.triton.launch import next_power_of_2
from pipeline.kernels.triton.rows import StepArrays

KEPT_AT_ONCE = 1024
"""Channels of a program that keeps the inputs of the convolution."""


def delta_rule(
    out: Tensor,
    values: Tensor,
    x: Tensor,
    slots: Tensor,
    reads: Tensor,
    writes: Tensor,
    step: StepArrays,
    vectors: DeltaVectors,
    options: DeltaOptions,
) -> None:
    """out [T, V * value_dim] of any dtype, x [T, options.shape.inputs] float32, `values` memory [T, V * value_dim]
    float32. `slots` [num_slots, floats of a slot]; `reads` [N] int32 is the slot that an entry continues, or -1, and
    `writes` [N] int32 the one that it writes. Entries without tokens change nothing."""
    shape = options.shape
    num_tokens, num_entries = len(x), step.num_entries
    assert x.shape == (num_tokens, shape.inputs) and out.shape == values.shape == (num_tokens, shape.values)
    assert shape.value_dim % SLICE == 0 and TAPS == 4
    where = slots, reads, writes, step.counts, step.offsets, slots.stride(0), options.layer
    _delta_rule[(num_entries, shape.value_heads, shape.value_dim // SLICE)](
        values,
        x,
        *where,
        vectors.conv,
        vectors.rates,
        vectors.dt_bias,
        options.beta,
        INPUTS=shape.inputs,
        CHANNELS=shape.channels,
        STATE=shape.state,
        KEY_HEADS=shape.key_heads,
        TILED=shape.tiled,
        VALUE_HEADS=shape.value_heads,
        KEY_DIM=shape.key_dim,
        VALUE_DIM=shape.value_dim,
        WIDTH=SLICE,
        KEY_BLOCK=next_power_of_2(shape.key_dim),
        EPS=L2_EPS,
        num_warps=4,
    )
    _keep_inputs[(num_entries, triton.cdiv(shape.channels, KEPT_AT_ONCE))](
        x, *where, INPUTS=shape.inputs, CHANNELS=shape.channels, STATE=shape.state, BLOCK=KEPT_AT_ONCE, num_warps=4
    )
    _delta_norm[(num_tokens, shape.value_heads)](
        out,
        values,
        x,
        vectors.norm,
        options.eps,
        INPUTS=shape.inputs,
        CHANNELS=shape.channels,
        VALUE_HEADS=shape.value_heads,
        VALUE_DIM=shape.value_dim,
        BLOCK=next_power_of_2(shape.value_dim),
        num_warps=1,
    )


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), which is x above 20, as in torch."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.where(x > 20.0, 20.0, x))))


@triton.jit
def _last_inputs(state, at, inside, CHANNELS: tl.constexpr):
    """The channels `at` of the last three tokens before the step, the oldest first."""
    first = tl.load(state + at, mask=inside, other=0.0)
    second = tl.load(state + CHANNELS + at, mask=inside, other=0.0)
    third = tl.load(state + 2 * CHANNELS + at, mask=inside, other=0.0)
    return first, second, third


@triton.jit
def _convolved(conv, at, inside, first, second, third, last, CHANNELS: tl.constexpr):
    """SiLU of the convolution of four tokens."""
    total = first * tl.load(conv + at, mask=inside, other=0.0)
    total += second * tl.load(conv + CHANNELS + at, mask=inside, other=0.0)
    total += third * tl.load(conv + 2 * CHANNELS + at, mask=inside, other=0.0)
    total += last * tl.load(conv + 3 * CHANNELS + at, mask=inside, other=0.0)
    return silu(total)


@triton.jit(do_not_specialize=["slot_size", "layer"])
def _delta_rule(
    values,
    x,
    slots,
    reads,
    writes,
    counts,
    offsets,
    slot_size,
    layer,
    conv,
    rates,
    dt_bias,
    beta_factor,
    INPUTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    STATE: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    TILED: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    EPS: tl.constexpr,
):
    """A program has a slice of a head of an entry."""
    entry, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(counts + entry)
    if count > 0:
        offset = tl.load(offsets + entry)
        read = tl.load(reads + entry).to(tl.int64)
        write = tl.load(writes + entry).to(tl.int64)
        has_state = read >= 0
        before = slots + tl.where(has_state, read, 0) * slot_size + layer
        dims, columns = tl.arange(0, KEY_BLOCK), tl.arange(0, WIDTH)
        inside = dims < KEY_DIM
        key_head = head % KEY_HEADS if TILED else head // (VALUE_HEADS // KEY_HEADS)
        queries = key_head * KEY_DIM + dims
        keys = KEY_HEADS * KEY_DIM + queries
        value = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + part * WIDTH + columns
        known, every = inside & has_state, (columns >= 0) & has_state
        query_0, query_1, query_2 = _last_inputs(before + STATE, queries, known, CHANNELS)
        key_0, key_1, key_2 = _last_inputs(before + STATE, keys, known, CHANNELS)
        value_0, value_1, value_2 = _last_inputs(before + STATE, value, every, CHANNELS)
        slices: tl.constexpr = VALUE_DIM // WIDTH
        at = ((head * slices + part) * KEY_DIM + dims[:, None]) * WIDTH + columns[None, :]
        state = tl.load(before + at, mask=known[:, None], other=0.0)
        rate, bias = tl.load(rates + head), tl.load(dt_bias + head)
        for i in range(count):
            token = (offset + i).to(tl.int64)
            inputs = x + token * INPUTS
            query_3 = tl.load(inputs + queries, mask=inside, other=0.0)
            key_3 = tl.load(inputs + keys, mask=inside, other=0.0)
            value_3 = tl.load(inputs + value)
            query = _convolved(conv, queries, inside, query_0, query_1, query_2, query_3, CHANNELS)
            key = _convolved(conv, keys, inside, key_0, key_1, key_2, key_3, CHANNELS)
            now = _convolved(conv, value, columns >= 0, value_0, value_1, value_2, value_3, CHANNELS)
            query *= 1.0 / tl.sqrt(tl.sum(query * query, 0) + EPS) / tl.sqrt(KEY_DIM * 1.0)
            key *= 1.0 / tl.sqrt(tl.sum(key * key, 0) + EPS)
            gates = inputs + CHANNELS + VALUE_HEADS * VALUE_DIM + head
            beta = beta_factor / (1.0 + tl.exp(-tl.load(gates)))
            state *= tl.exp(rate * _softplus(tl.load(gates + VALUE_HEADS) + bias))
            change = (now - tl.sum(state * key[:, None], 0)) * beta
            state += key[:, None] * change[None, :]
            made = tl.sum(state * query[:, None], 0)
            tl.store(values + token * VALUE_HEADS * VALUE_DIM + head * VALUE_DIM + part * WIDTH + columns, made)
            query_0, query_1, query_2 = query_1, query_2, query_3
            key_0, key_1, key_2 = key_1, key_2, key_3
            value_0, value_1, value_2 = value_1, value_2, value_3
        tl.store(slots + write * slot_size + layer + at, state, mask=inside[:, None])


@triton.jit(do_not_specialize=["slot_size", "layer"])
def _keep_inputs(
    x,
    slots,
    reads,
    writes,
    counts,
    offsets,
    slot_size,
    layer,
    INPUTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    STATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program has some channels of an entry; it reads those of the slot before it writes any, as it may be the same
    one."""
    entry = tl.program_id(0)
    count = tl.load(counts + entry)
    if count > 0:
        channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = channels < CHANNELS
        read = tl.load(reads + entry).to(tl.int64)
        before = slots + tl.where(read >= 0, read, 0) * slot_size + layer + STATE
        after = slots + tl.load(writes + entry).to(tl.int64) * slot_size + layer + STATE
        end = x + (tl.load(offsets + entry) + count).to(tl.int64) * INPUTS
        known = inside & (read >= 0)
        # Input i of three is that of the token 3 - i before the end, or of the slot: i + count in it.
        first = tl.load(before + count * CHANNELS + channels, mask=known & (count < 3), other=0.0)
        first = tl.where(count > 2, tl.load(end - 3 * INPUTS + channels, mask=inside & (count > 2), other=0.0), first)
        second = tl.load(before + (1 + count) * CHANNELS + channels, mask=known & (count < 2), other=0.0)
        second = tl.where(count > 1, tl.load(end - 2 * INPUTS + channels, mask=inside & (count > 1), other=0.0), second)
        third = tl.load(end - INPUTS + channels, mask=inside, other=0.0)
        tl.store(after + channels, first, mask=inside)
        tl.store(after + CHANNELS + channels, second, mask=inside)
        tl.store(after + 2 * CHANNELS + channels, third, mask=inside)


@triton.jit
def _delta_norm(
    out,
    values,
    x,
    norm,
    eps,
    INPUTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program has a head of a token: rms(o) w silu(z)."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < VALUE_DIM
    at = token * VALUE_HEADS * VALUE_DIM + head * VALUE_DIM + columns
    made = tl.load(values + at, mask=inside, other=0.0)
    z = tl.load(x + token * INPUTS + CHANNELS + head * VALUE_DIM + columns, mask=inside, other=0.0)
    made *= 1.0 / tl.sqrt(tl.sum(made * made, 0) / VALUE_DIM + eps)
    made *= tl.load(norm + columns, mask=inside, other=0.0) * silu(z)
    tl.store(out + at, made.to(out.dtype.element_ty), mask=inside)
