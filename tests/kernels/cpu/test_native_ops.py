"""Each op of the CPU library follows its formula for every instruction set, with the same bits in every batch."""

import ctypes

import numpy as np
import pytest
import torch

from pipeline.kernels.attention.hadamard import hadamard_reference
from pipeline.kernels.cpu import native
from pipeline.kernels.cpu.native import ActivationForm, KVType
from pipeline.kernels.matrix import Matrix, quantize
from pipeline.kernels.step_inputs import BLOCK_SIZE
from pipeline.kernels.stored_matrix import Format
from tests.kernels.cpu.kv_memory import KVMemory, hadamard, quantize_heads
from tests.kernels.cpu.recording import (
    EPS,
    FORMATS,
    MOST,
    MOST_BLOCK_CODE,
    MOST_BLOCK_SUM,
    TINY,
    ActivationArray,
    Recording,
    assert_groups,
    assert_kept,
    assert_near,
    assert_rounded_to_bf16,
    exact,
    form_of,
    product,
    quantize_blocks,
    quantize_rows,
    random,
    random_matrix,
    read_floats,
    recording,
    upcast,
    whole,
)

ROWS = [*range(1, 14), 32, 50]
"""Every number of rows of one tile, for any instruction set, and numbers that need several tiles."""
PAIR = 8


def rms_norm(residual: np.ndarray, weight: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """The formula and its error: a sum of K squares, a square root that halves the error, and five roundings."""
    wide = residual.astype(np.float64)
    out = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + np.float32(eps)) * weight
    return out, (residual.shape[1] / 2 + 5) * EPS * np.abs(out) + TINY


# --- embed, norm, quantize


def test_an_embedding_is_exactly_its_row(library: ctypes.CDLL, format: Format) -> None:
    width = whole(96, format)
    table = random_matrix(0, 37, width, format)
    ids = np.array([0, 36, 15, 16, 17, 36, 3, 31, 32], np.int32)
    with recording(library, threads=2) as r:
        residual = r.floats(np.full((9, width), np.nan))
        library.program_embed(r.program, residual.ctypes.data, r.pack(table), 1.0)
        r.fill([(0, 4), (7, 5)], ids=ids)
        assert r.run() == 0
    np.testing.assert_array_equal(residual, exact(table)[ids])


@pytest.mark.parametrize("width", [2, 30, 64, 80, 226, 576])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_a_norm_writes_plain_activations(library: ctypes.CDLL, width: int, scale: float) -> None:
    residual, weight = random(1, 7, width, scale=scale), random(2, width) + 1
    with recording(library) as r:
        rows = r.rows(7, width)
        library.program_norm(
            r.program,
            rows,
            ActivationForm.PLAIN,
            r.floats(residual).ctypes.data,
            r.floats(weight).ctypes.data,
            width,
            1e-5,
            0,
        )
        r.tokens(7)
        assert r.run() == 0
        assert_kept(r, r.read_plain(rows, 7, width), *rms_norm(residual, weight, 1e-5))


@pytest.mark.parametrize("form", [ActivationForm.BYTES, ActivationForm.WORDS, ActivationForm.SPLIT])
@pytest.mark.parametrize("width", [32, 64, 96, 576])
def test_a_norm_writes_quantized_groups(library: ctypes.CDLL, width: int, form: ActivationForm) -> None:
    residual, weight = random(3, 5, width, scale=20), random(4, width) + 1
    with recording(library, threads=3) as r:
        rows = r.rows(5, width)
        library.program_norm(
            r.program, rows, form, r.floats(residual).ctypes.data, r.floats(weight).ctypes.data, width, 1e-6, 0
        )
        r.tokens(5)
        assert r.run() == 0
        assert_groups(r.read_groups(rows, 5, width, form), *rms_norm(residual, weight, 1e-6))


@pytest.mark.parametrize("form", [form for form in ActivationForm if form is not ActivationForm.BLOCKS])
def test_a_norm_of_sampled_tokens_skips_the_others(library: ctypes.CDLL, form: ActivationForm) -> None:
    residual, weight = random(5, 12, 64), random(6, 64)
    with recording(library) as r:
        rows = r.rows(12, 64)
        library.program_norm(
            r.program, rows, form, r.floats(residual).ctypes.data, r.floats(weight).ctypes.data, 64, 1e-5, 1
        )
        r.fill([(0, 3), (5, 1), (2, 4), (0, 4)], samples=[True, False, True, True])
        before = rows.memory.copy()
        assert r.run() == 0
        expected, error = rms_norm(residual[[2, 7, 11]], weight, 1e-5)
        if form is ActivationForm.PLAIN:
            assert_kept(r, r.read_plain(rows, 3, 64), expected, error)
        else:
            assert_groups(r.read_groups(rows, 3, 64, form), expected, error)
        np.testing.assert_array_equal(rows.memory[3:], before[3:])


@pytest.mark.parametrize("form", [ActivationForm.BYTES, ActivationForm.WORDS, ActivationForm.SPLIT])
def test_quantized_activations_match_the_definition_exactly(library: ctypes.CDLL, form: ActivationForm) -> None:
    values = random(7, 9, 160)
    values[0, :32] = 0
    values[1, 32:64] = -0.0
    values[2] = np.arange(160) / 3 - 20
    values[3, :32] = 5  # all of them the maximum
    values[4, 5] = -1e30
    values[5] *= 1e-30
    values[6, :32] = np.arange(-16, 16) + 0.5  # ties, if the largest magnitude is 127
    values[6, 31] = -MOST[form][0]
    with recording(library, threads=2) as r:
        rows = r.rows(9, 160)
        library.program_quantize(r.program, rows, form, r.floats(values).ctypes.data, 160)
        r.tokens(9)
        assert r.run() == 0
        kept = r.read_groups(rows, 9, 160, form)
    codes, scales = quantize_rows(values, form)
    np.testing.assert_array_equal(kept.codes, codes)
    np.testing.assert_array_equal(kept.scales, scales)
    assert kept.codes[6, :4].tolist() == [-16, -14, -14, -12]


def test_activations_in_blocks_match_the_definition_exactly(library: ctypes.CDLL) -> None:
    values = random(7, 8, 512)
    values[0, :256] = 0
    values[1] = -0.0
    values[2] = np.arange(512) / 3 - 80
    values[3, :256] = 5  # the sum of 64 numbers limits the codes
    values[4, 5] = -1e30  # the largest one limits them
    values[5] *= 1e-30
    values[6, :256] = np.arange(-128, 128) + 0.5
    values[6, 255] = -MOST_BLOCK_CODE  # ties
    values[7, 64:128] *= 50
    with recording(library, threads=2) as r:
        rows = r.rows(8, 512)
        library.program_quantize(r.program, rows, ActivationForm.BLOCKS, r.floats(values).ctypes.data, 512)
        r.tokens(8)
        assert r.run() == 0
        kept = r.read_blocks(rows, 8, 512)
    codes, scales = quantize_blocks(values)
    np.testing.assert_array_equal(kept.codes, codes)
    np.testing.assert_array_equal(kept.scales, scales)
    assert kept.codes[6, :4].tolist() == [-128, -126, -126, -124]
    assert kept.codes[4, 5] == -MOST_BLOCK_CODE and kept.codes[3, 0] == (MOST_BLOCK_SUM - 64) // 64


@pytest.mark.parametrize("format", ["q4_k", "q5_k", "q6_k"])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_weights_and_activations_do_not_overflow(library: ctypes.CDLL, format: Format, sign: int) -> None:
    """All codes and scales of a K-quant at their largest magnitudes, times activations of one magnitude."""
    matrix = random_matrix(60, 16, 256, format)
    data = matrix.data
    if format == "q6_k":
        data[:, :192] = 0  # code -32
        data[:, 192:208] = 0x80  # scale -128
    else:
        data[:, 4:12], data[:, 12:16], data[:, 16:] = 0xFF, 0xFF, 0xFF
    for num in (1, 2, 5):
        values = np.full((num, 256), sign, np.float32)
        with recording(library) as r:
            rows, out = r.rows(num, 256), r.floats(np.zeros((num, 16)))
            kept = r.put(rows, values, ActivationForm.BLOCKS)
            packed = r.pack(matrix)
            packed._obj.form = ActivationForm.BLOCKS
            library.program_linear_add(r.program, out.ctypes.data, rows, packed, 16, 1.0)
            r.tokens(num)
            assert r.run() == 0
        assert_near(out, *product(kept, matrix))


@pytest.mark.parametrize("format", [format for format in FORMATS if format != "bf16"])
def test_activations_too_small_to_quantize_are_nearly_zero(library: ctypes.CDLL, format: Format) -> None:
    """1 / scale overflows float32."""
    depth = whole(64, format)
    values = random(8, 4, depth)
    values[:, :32] *= np.float32(1e-38) * np.array([[1], [1e-2], [1e-4], [1e-6]], np.float32)
    matrix = random_matrix(9, 16, depth, format)
    with recording(library) as r:
        rows, residual = r.rows(4, depth), r.floats(np.zeros((4, 16)))
        library.program_quantize(r.program, rows, form_of(format), r.floats(values).ctypes.data, depth)
        library.program_linear_add(r.program, residual.ctypes.data, rows, r.pack(matrix), 16, 1.0)
        r.tokens(4)
        assert r.run() == 0
        values[:, :32] = 0
        kept = r.put(r.rows(4, depth), values, form_of(format))
    assert_near(residual, *product(kept, matrix))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_is_not_lost_and_stays_in_its_row(
    library: ctypes.CDLL, format: Format, value: float
) -> None:
    """As codes it would be a number like others: the model would answer nonsense instead of failing."""
    depth = whole(96, format)
    values, matrix = random(8, 20, depth), random_matrix(9, 32, depth, format)
    found = []
    for bad in ({}, {3: 0, 7: 40, 16: depth - 1}):
        for row, column in bad.items():
            values[row, column] = value
        with recording(library) as r:
            rows, residual = r.rows(20, depth), r.floats(np.zeros((20, 32)))
            if form_of(format) == ActivationForm.PLAIN:
                r.put(rows, values, ActivationForm.PLAIN)
            else:
                library.program_quantize(r.program, rows, form_of(format), r.floats(values).ctypes.data, depth)
            library.program_linear_add(r.program, residual.ctypes.data, rows, r.pack(matrix), 32, 1.0)
            r.tokens(20)
            assert r.run() == 0
            found.append(residual.copy())
    others = [row for row in range(20) if row not in bad]
    assert not np.isfinite(found[1][list(bad)]).any()
    np.testing.assert_array_equal(found[1][others], found[0][others])


# --- products


def test_a_product_with_the_identity_returns_its_input(library: ctypes.CDLL) -> None:
    residual, weight = random(10, 11, 80), random(11, 80)
    identity = quantize(torch.eye(80), "bf16")
    with recording(library) as r:
        rows, out = r.rows(11, 80), r.floats(np.zeros((11, 80)))
        library.program_norm(
            r.program,
            rows,
            ActivationForm.PLAIN,
            r.floats(residual).ctypes.data,
            r.floats(weight).ctypes.data,
            80,
            1e-5,
            0,
        )
        library.program_linear_add(r.program, out.ctypes.data, rows, r.pack(identity), 80, 1.0)
        r.tokens(11)
        assert r.run() == 0
        np.testing.assert_array_equal(out, r.read_plain(rows, 11, 80))


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("width", [40, 64, 2])
def test_a_product_is_added_to_the_residual(library: ctypes.CDLL, format: Format, width: int, bias: bool) -> None:
    depth = 102 if format == "bf16" else 2 * whole(48, format)
    matrix = random_matrix(12, width, depth, format)
    shift = random(13, width) if bias else np.zeros(width)
    activations, before = random(14, 50, depth, scale=2), random(15, 50, width)
    with recording(library, threads=2) as r:
        rows, residual = r.rows(50, depth), r.floats(before)
        kept = r.put(rows, activations, form_of(format))
        library.program_linear_add(
            r.program, residual.ctypes.data, rows, r.pack(matrix, bias=shift if bias else None), width, 1.0
        )
        r.tokens(50)
        assert r.run() == 0
    expected, error = product(kept, matrix)
    sums = np.abs(expected) + np.abs(shift) + np.abs(before)
    assert_near(residual, expected + shift + before, error + 2 * EPS * sums)


def test_every_8_bit_float_is_widened_exactly(library: ctypes.CDLL) -> None:
    """The sum of a row with one weight is that weight, for one row of activations and for several."""
    codes = np.array([code for code in range(256) if code & 127 != 127], np.uint8)
    blocks = np.zeros((254, 132), np.uint8)
    blocks[:, :4] = np.ones(1, np.float32).view(np.uint8)
    blocks[:, 4 + 77] = codes
    matrix = Matrix("fp8", torch.from_numpy(blocks), 254, 128)
    expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).double().numpy()
    assert np.unique(np.abs(expected)).size == 127
    for num in (1, 2, 20):
        with recording(library) as r:
            rows, out = r.rows(num, 128), r.floats(np.zeros((num, 254)))
            r.put(rows, np.ones((num, 128), np.float32), ActivationForm.PLAIN)
            library.program_linear_add(r.program, out.ctypes.data, rows, r.pack(matrix), 254, 1.0)
            r.tokens(num)
            assert r.run() == 0
        np.testing.assert_array_equal(out, np.broadcast_to(expected, (num, 254)))
    np.testing.assert_array_equal(exact(matrix)[:, 77], expected)  # which embeddings are compared with


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("depth", [2, 64, 106])
def test_other_floats_are_rounded_when_they_are_packed(library: ctypes.CDLL, dtype: torch.dtype, depth: int) -> None:
    values = torch.from_numpy(random(50, 37, depth, scale=3))
    values[3, :2] = torch.tensor([1.00390625, 1.01171875])  # halves between two bfloat16
    values[4, 0], values[5, 1] = 1e-40, -6e-8  # below the normal numbers of float32, of float16
    values = values.to(dtype)
    stored = quantize(values.bfloat16(), "bf16")
    columns = 48
    with recording(library, threads=2) as r:
        packed = r.pack(stored)
        num_bytes = library.panel_bytes(packed) * columns // native.PANEL
        panels = r.memory(num_bytes)
        step = values.stride(0) * values.element_size()
        rows = np.array([values.data_ptr() + i * step for i in range(37)] + [0] * 11, np.uint64)
        source = {torch.float32: 1, torch.float16: 2}[dtype]
        library.pack_floats(r.thread_pool.handle, packed, panels.ctypes.data, rows.ctypes.data, source)
        expected = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(packed._obj.panels))
        np.testing.assert_array_equal(panels, expected)


def test_a_row_of_a_product_has_the_same_bits_in_every_batch(library: ctypes.CDLL, format: Format) -> None:
    """On one to three threads, at any position, among any number of rows."""
    depth = whole(96, format)
    matrix, activations = random_matrix(16, 136, depth, format), random(17, 50, depth)
    results = []
    for threads in (1, 2, 3):
        with recording(library, threads=threads) as r:
            rows, residual = r.rows(50, depth), r.floats(np.zeros((50, 136)))
            library.program_linear_add(r.program, residual.ctypes.data, rows, r.pack(matrix), 136, 1.0)
            for num in ROWS:
                for first in {0, 50 - num}:
                    r.put(rows, activations[first : first + num], form_of(format))
                    residual[:] = 0
                    r.tokens(num)
                    assert r.run() == 0
                    results.append((first, residual[:num].copy()))
                    assert not residual[num:].any(), "rows beyond the step were written"
    alone = np.full((50, 136), np.nan, np.float32)
    for first, made in results:
        part = alone[first : first + len(made)]
        part[:] = np.where(np.isnan(part), made, part)
        np.testing.assert_array_equal(made, part)


@pytest.mark.parametrize("floats", [False, True], ids=["plain", "floats"])
@pytest.mark.parametrize("inner", [20, 40, 96, 2])
def test_swiglu(library: ctypes.CDLL, format: Format, inner: int, floats: bool) -> None:
    depth = whole(64, format)
    matrix, bias = random_matrix(18, 2 * inner, depth, format), random(19, 2 * inner)
    activations = random(20, 19, depth)
    padded = inner + -inner % PAIR
    with recording(library, threads=2) as r:
        rows = r.rows(19, depth)
        out = r.wide_rows(19, padded * 4) if floats else r.rows(19, inner)
        kept = r.put(rows, activations, form_of(format))
        weights = r.pack(matrix, gated_order(inner), bias)
        library.program_swiglu(r.program, out, floats, r.products((weights, rows)), 1, 0)
        r.tokens(19)
        assert r.run() == 0
        expected, error = gated(kept, matrix, bias)
        if floats:
            assert_near(read_floats(out, 19, inner), expected, error)
        else:
            assert_kept(r, r.read_plain(out, 19, inner), expected, error)


@pytest.mark.parametrize("gate", [-3e38, -1e4, -200.0, -100.0, -89.5, -88.0, -87.0, -0.0, 50.0, 88.0, 200.0, 1e6])
def test_swiglu_with_gates_of_any_size(library: ctypes.CDLL, gate: float) -> None:
    matrix = quantize(torch.zeros(32, 32), "bf16")
    bias = np.concatenate([np.full(16, gate), np.full(16, 3.0)])
    with recording(library) as r:
        rows, out = r.rows(1, 32), r.wide_rows(1, 64)
        r.put(rows, random(21, 1, 32), ActivationForm.PLAIN)
        weights = r.pack(matrix, gated_order(16), bias)
        library.program_swiglu(r.program, out, True, r.products((weights, rows)), 1, 0)
        r.tokens(1)
        assert r.run() == 0
    with np.errstate(over="ignore"):
        expected = gate / (1 + np.exp(-np.float64(gate))) * 3.0
    # A gate of -87 leaves 1e-36, and exp need not be exact there.
    assert_near(read_floats(out, 1, 16), np.full((1, 16), expected), 8 * EPS * abs(expected) + 1e-35)


@pytest.mark.parametrize("kind", [0, 3, 4], ids=["silu", "relu", "relu2"])
@pytest.mark.parametrize(("gate", "up"), [(np.nan, 3.0), (-200.0, np.nan), (1.0, np.nan)])
def test_nan_is_not_lost_in_an_activation(library: ctypes.CDLL, kind: int, gate: float, up: float) -> None:
    matrix = quantize(torch.zeros(32, 32), "bf16")
    bias = np.concatenate([np.full(16, gate), np.full(16, up)])
    bias[[3, 19]] = 1.0
    with recording(library) as r:
        rows, out = r.rows(1, 32), r.wide_rows(1, 64)
        r.put(rows, random(21, 1, 32), ActivationForm.PLAIN)
        weights = r.pack(matrix, gated_order(16), bias)
        library.program_swiglu(r.program, out, True, r.products((weights, rows)), 1, kind)
        r.tokens(1)
        assert r.run() == 0
    assert np.flatnonzero(np.isfinite(read_floats(out, 1, 16)[0])).tolist() == [3]


def gated_order(inner: int) -> list[int]:
    """Rows of a panel: eight outputs of gate, then the matching eight of up; -1 behind the last."""
    eights = [[i if i < inner else -1 for i in range(begin, begin + PAIR)] for begin in range(0, inner, PAIR)]
    return [row for eight in eights for row in [*eight, *(i + inner if i >= 0 else -1 for i in eight)]]


def gated(kept: ActivationArray, matrix: Matrix, bias: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """silu(gate) x up, with the error of the product propagated: |silu(x)'| < 1.1."""
    out, error = product(kept, matrix)
    error = error + EPS * (np.abs(out) + np.abs(out + bias))
    (gate, up), (gate_error, up_error) = np.split(out + bias, 2, axis=1), np.split(error, 2, axis=1)
    silu = gate / (1 + np.exp(-gate))
    expected = silu * up
    # exp has an error of 2e-7; then come one sum, one quotient and one product.
    error = (np.abs(silu) + gate_error) * up_error + 1.1 * gate_error * np.abs(up) + 7 * EPS * np.abs(expected)
    return expected, error + TINY


# --- queries, keys and values


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


# --- a program


def test_a_profile_names_every_op_and_its_cost(library: ctypes.CDLL) -> None:
    matrix = random_matrix(26, 48, 64, "q4_0")
    with recording(library, threads=2) as r:
        rows, residual = r.rows(5, 64), r.floats(np.zeros((5, 48)))
        r.put(rows, random(27, 5, 64), ActivationForm.BYTES)
        library.program_quantize(r.program, rows, ActivationForm.BYTES, r.floats(random(28, 5, 64)).ctypes.data, 64)
        library.program_linear_add(r.program, residual.ctypes.data, rows, r.pack(matrix), 48, 1.0)
        r.tokens(5)
        seconds = np.full(2, np.nan)
        assert library.program_size(r.program) == 2
        assert library.program_profile(r.program, 5, 5, 5, seconds.ctypes.data) == 0
        assert [library.program_name(r.program, i) for i in range(2)] == [b"quantize", b"linear_add"]
        assert (seconds >= 0).all() and (seconds < 10).all()
        cost = (ctypes.c_double * 3)()
        library.program_cost(r.program, 1, 5, 5, 5, cost)
    # 48 rows of two groups of 18 bytes, and float32 input and output of five tokens.
    assert list(cost) == [48 * 2 * 18 + 5 * (64 + 48) * 4, 2 * 5 * 48 * 64, 1]


def test_a_program_repeats_its_results_in_every_step(library: ctypes.CDLL) -> None:
    """Many short steps on more threads than there are cores: no state carries over to the next step."""
    matrix = random_matrix(30, 512, 64, "bf16")
    with recording(library, threads=4) as r:
        rows, residual = r.rows(7, 64), r.floats(np.zeros((7, 512)))
        repeat(r, rows, residual, matrix)


def repeat(r: Recording, rows: native.NativeRows, residual: np.ndarray, matrix: Matrix) -> None:
    r.put(rows, random(31, 7, 64), ActivationForm.PLAIN)
    r.library.program_linear_add(r.program, residual.ctypes.data, rows, r.pack(matrix), 512, 1.0)
    r.tokens(7)
    assert r.run() == 0
    first = residual.copy()
    for _ in range(300):
        residual[:] = 0
        assert r.run() == 0
        np.testing.assert_array_equal(residual, first)
