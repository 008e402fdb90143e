"""Products of activations and weights, and the activation functions behind them."""

import ctypes

import numpy as np
import pytest
import torch

from pipeline.kernels.cpu import native
from pipeline.kernels.cpu.native import ActivationForm
from pipeline.kernels.matrix import Matrix, quantize
from pipeline.kernels.stored_matrix import Format
from tests.kernels.cpu.ops.formulas import PAIR, ROWS
from tests.kernels.cpu.quantized import (
    EPS,
    TINY,
    ActivationArray,
    exact,
    product,
    random,
    random_matrix,
    read_floats,
    whole,
)
from tests.kernels.cpu.recording import assert_kept, assert_near, form_of, recording


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


@pytest.mark.parametrize("kind", [0, 3, 4, 6], ids=["silu", "relu", "relu2", "gelu_quick"])
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
