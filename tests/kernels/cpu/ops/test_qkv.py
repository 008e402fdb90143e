"""Queries, keys and values: their norms, rotary embeddings, and how they are stored."""

import ctypes

import numpy as np
import pytest
import torch

from pipeline.kernels.attention.hadamard import hadamard_reference
from pipeline.kernels.cpu import native
from pipeline.kernels.cpu.native import ActivationForm, KVType
from pipeline.kernels.matrix import Matrix
from pipeline.kernels.step_inputs import BLOCK_SIZE
from pipeline.kernels.stored_matrix import Format
from tests.kernels.cpu.kv_memory import KVMemory, hadamard, quantize_heads
from tests.kernels.cpu.ops.formulas import PAIR
from tests.kernels.cpu.quantized import EPS, TINY, product, random, random_matrix, upcast, whole
from tests.kernels.cpu.recording import assert_kept, assert_near, assert_rounded_to_bf16, form_of, recording


def turned_order(num_turning: int, num_heads: int, head_dim: int) -> np.ndarray:
    """Rows in panel order: in rotary heads, eight of the first half, then the eight that they rotate with."""
    half = head_dim // 2
    turned = [i + part for begin in range(0, half, PAIR) for part in (0, half) for i in range(begin, begin + PAIR)]
    heads = [turned if head < num_turning else list(range(head_dim)) for head in range(num_heads)]
    return np.array([head * head_dim + i for head, order in enumerate(heads) for i in order])


def turn(heads: np.ndarray, error: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[T, heads, head_dim], each number with the one half a head away; two products and a sum are rounded."""
    a, b = np.split(heads, 2, axis=-1)
    a_error, b_error = np.split(error, 2, axis=-1)
    cos, sin = cos[:, None].astype(np.float64), sin[:, None].astype(np.float64)
    out = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    size = np.concatenate([np.abs(a * cos) + np.abs(b * sin), np.abs(b * cos) + np.abs(a * sin)], axis=-1)
    moved = [np.abs(cos) * a_error + np.abs(sin) * b_error, np.abs(cos) * b_error + np.abs(sin) * a_error]
    return out, np.concatenate(moved, axis=-1) + 2 * EPS * size + TINY


def norm_heads(heads: np.ndarray, error: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The RMS norm of each head, [T, heads, head_dim]. The error has three parts: that of the number, that of the
    norm's factor, and the roundings of `rms_norm` above."""
    factor = 1 / np.sqrt((heads**2).mean(-1, keepdims=True) + np.float32(1e-5))
    out = heads * factor * weight
    moved = factor * np.abs(weight) * error + np.abs(out) * factor**2 * (np.abs(heads) * error).mean(-1, keepdims=True)
    return out, 1.1 * moved + (heads.shape[-1] / 2 + 5) * EPS * np.abs(out) + TINY


# The epilogue is the same for all formats; these differ in how the matmul before it is cut into parts.
@pytest.mark.parametrize(
    "format",
    [("bf16", "int12"), ("q8_0", "int12"), ("q4_1", "int12"), ("q4_k", "int8"), ("q6_k", "int12")],
    ids="-".join,
    indirect=True,
)
@pytest.mark.parametrize(("bias", "normed"), [(False, False), (True, False), (True, True)], ids=["", "bias", "normed"])
@pytest.mark.parametrize("kv_type", KVType)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(3, 1, 32), (4, 4, 16), (6, 2, 64), (2, 1, 80), (1, 1, 96), (2, 1, 256)]
)
def test_rotary_embedding_and_kv_writes(
    library: ctypes.CDLL,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    format: Format,
    bias: bool,
    normed: bool,
    kv_type: KVType,
) -> None:
    depth, num_blocks, all_heads = whole(64, format), 9, num_heads + 2 * num_kv_heads
    width = num_heads * head_dim
    matrix = random_matrix(22, all_heads * head_dim, depth, format)
    shift = random(23, all_heads * head_dim) if bias else np.zeros(all_heads * head_dim)
    angles = np.random.default_rng(24).uniform(-np.pi, np.pi, (200, head_dim // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    entries = [(0, 3), (17, 1), (14, 20), (99, 1)]
    num = sum(count for _, count in entries)
    tables = np.zeros((4, 7), np.int32)
    tables[0, 0], tables[1, 1], tables[2, :3], tables[3, 6] = 8, 3, [1, 0, 6], 5
    order = turned_order(num_heads + num_kv_heads, all_heads, head_dim)
    in_head = turned_order(1, 1, head_dim)
    norms = [random(26, head_dim) + 1, random(27, head_dim) + 1] if normed else []
    center = 5 * random(28, num_kv_heads, head_dim) if bias and not normed else None
    factors = np.exp(random(29, num_kv_heads, head_dim)) if bias and normed else None
    with recording(library, threads=2) as r:
        rows, queries = r.rows(num, depth), r.rows(num, width)
        kept = r.put(rows, random(25, num, depth), form_of(format))
        of_keys = (None if array is None else array[:, in_head] for array in (center, factors))
        kv = KVMemory(r, num_blocks, num_kv_heads, head_dim, kv_type, *of_keys)
        untouched = kv.bytes.copy()
        library.program_qkv(
            r.program,
            queries,
            r.products((r.pack(matrix, order.tolist(), shift if bias else None), rows)),
            1,
            num_heads,
            kv.layer,
            r.floats(cos).ctypes.data,
            r.floats(sin).ctypes.data,
            ctypes.byref(native.NativeHeadNorms(*(r.floats(w[in_head]).ctypes.data for w in norms), 1e-5))
            if norms
            else None,
            None,
            None,
        )
        r.fill(entries, tables=tables)
        assert r.run() == 0
        positions, slots = r.inputs.positions[:num], r.inputs.slots[:num]

    out, error = product(kept, matrix)
    error = (error + EPS * (np.abs(out) + np.abs(out + shift))).reshape(num, all_heads, head_dim)
    heads = (out + shift).reshape(num, all_heads, head_dim)
    turning = num_heads + num_kv_heads
    values_error = error[:, turning:]
    if normed:
        weight = np.stack([norms[0]] * num_heads + [norms[1]] * num_kv_heads)
        heads[:, :turning], error[:, :turning] = norm_heads(heads[:, :turning], error[:, :turning], weight)
    turned, turned_error = turn(heads[:, :turning], error[:, :turning], cos[positions], sin[positions])

    if center is not None:
        turned[:, num_heads:] -= center
        turned_error[:, num_heads:] += EPS * np.abs(turned[:, num_heads:])
    if kv_type is KVType.INT8:
        if factors is not None:
            all_factors = np.concatenate([(1 / factors).repeat(num_heads // num_kv_heads, 0), factors])
            turned, turned_error = turned * all_factors, turned_error * all_factors
            turned_error += 2 * EPS * np.abs(turned)
        turned, turned_error = transform_heads(turned, turned_error)
    expected = turned[:, :num_heads, in_head] / head_dim**0.5
    bound = turned_error[:, :num_heads, in_head] / head_dim**0.5 + 3 * EPS * np.abs(expected)
    assert_kept(r, r.read_plain(queries, num, width), expected.reshape(num, width), bound.reshape(num, width))

    blocks, offsets = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    made, scales = kv.read(blocks, offsets), kv.read_scales(blocks, offsets) if kv_type is KVType.INT8 else None
    expected_keys, keys_error = turned[:, num_heads:, in_head], turned_error[:, num_heads:, in_head]
    if scales is None:
        assert_rounded_to_bf16(upcast(made[0]), expected_keys, keys_error)
        assert_rounded_to_bf16(upcast(made[1]), heads[:, turning:], values_error)
    else:
        assert_quantized(made[0], scales[0], expected_keys, keys_error)
        matrix = np.abs(hadamard(np.eye(head_dim)))
        values = heads[:, turning:]
        values_error = values_error @ matrix + 9 * EPS * (np.abs(values) @ matrix)
        assert_quantized(made[1], scales[1], hadamard(values), values_error)
    every = np.arange(num_blocks * BLOCK_SIZE)
    other_slots = np.setdiff1d(every, slots)
    others = other_slots // BLOCK_SIZE, other_slots % BLOCK_SIZE
    after = kv.read(*others)
    after_scales = kv.scales[others[0], :, :, others[1]]
    kv.bytes[:] = untouched
    for was, now in zip(
        (*kv.read(*others), kv.scales[others[0], :, :, others[1]]), (*after, after_scales), strict=True
    ):
        np.testing.assert_array_equal(now, was)


def transform_heads(heads: np.ndarray, error: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The Hadamard transform of heads [tokens, heads, D] that are known within `error`, with the new error."""
    matrix = hadamard_reference(heads.shape[-1]).numpy()
    # Eight additions and a multiplication round.
    return heads @ matrix, error @ np.abs(matrix) + 9 * EPS * (np.abs(heads) @ np.abs(matrix))


def assert_quantized(codes: np.ndarray, scales: np.ndarray, expected: np.ndarray, error: np.ndarray) -> None:
    """Codes [tokens, heads, D] int8 and scales [tokens, heads] of numbers within the bound."""
    tops, most = np.abs(expected).max(-1), error.max(-1)
    low, high = ((tops + sign * (most + 2 * EPS * tops)) / 127 for sign in (-1, 1))
    # Rounded up to bfloat16, which has 8 bits.
    assert (low <= scales).all() and (scales <= high * (1 + 2**-7)).all()
    bound = scales[..., None] * (0.5 + 4 * 127 * EPS) + error
    assert_near(codes * scales[..., None].astype(np.float64), expected, bound)


def test_keys_and_values_in_8_bits_are_those_of_the_reference(library: ctypes.CDLL) -> None:
    """Numbers of any size, ties, zeros, and numbers that are too small for a scale: written bit by bit as defined."""
    head_dim = 32
    rows = random(40, 64, 2 * head_dim)
    rows *= np.float32(10.0) ** np.linspace(-37, 36, 64, dtype=np.float32)[:, None]
    rows[0], rows[1] = 0, 1e-38
    rows[2] = np.float32(0.5) * np.arange(-32, 32)  # a scale of a power of two, so that halves are ties
    rows[2, [0, head_dim]] = 127
    with recording(library) as r:
        inputs, queries = r.rows(64, 64), r.rows(64, head_dim)
        kv = KVMemory(r, 4, 1, head_dim, KVType.INT8)
        # Values are the product with ones, so they are the inputs.
        identity = np.zeros((3 * head_dim, 2 * head_dim), np.float32)
        identity[head_dim:] = np.eye(2 * head_dim)
        matrix = Matrix("bf16", torch.from_numpy(identity).bfloat16(), *identity.shape)
        kept = r.put(inputs, rows, ActivationForm.PLAIN)
        order = turned_order(2, 3, head_dim)
        angles = np.zeros((64, head_dim // 2), np.float32)
        library.program_qkv(
            r.program,
            queries,
            r.products((r.pack(matrix, order.tolist()), inputs)),
            1,
            1,
            kv.layer,
            r.floats(angles + 1).ctypes.data,
            r.floats(angles).ctypes.data,
            None,
            None,
            None,
        )
        r.fill([(0, 64)], tables=np.arange(4, dtype=np.int32)[None])
        assert r.run() == 0
        offsets = np.arange(64) // BLOCK_SIZE, np.arange(64) % BLOCK_SIZE
        made, scales = kv.read(*offsets), kv.read_scales(*offsets)
    in_head = turned_order(1, 1, head_dim)
    given = kept.values.astype(np.float32).reshape(64, 2, 1, head_dim)
    for i, expected in enumerate((given[:, 0][..., in_head], given[:, 1])):
        codes, expected_scales = quantize_heads(hadamard(expected))
        np.testing.assert_array_equal(scales[i], expected_scales)
        np.testing.assert_array_equal(made[i], codes)
