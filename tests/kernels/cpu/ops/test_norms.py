"""Embeddings, norms and the quantization of activations."""

import ctypes

import numpy as np
import pytest

from pipeline.kernels.cpu.native import ActivationForm
from pipeline.kernels.stored_matrix import Format
from tests.kernels.cpu.ops.formulas import rms_norm
from tests.kernels.cpu.quantized import (
    FORMATS,
    MOST,
    MOST_BLOCK_CODE,
    MOST_BLOCK_SUM,
    exact,
    product,
    quantize_blocks,
    quantize_rows,
    random,
    random_matrix,
    whole,
)
from tests.kernels.cpu.recording import assert_groups, assert_kept, assert_near, form_of, recording


def test_an_embedding_is_exactly_its_row(library: ctypes.CDLL, format: Format) -> None:
    width = whole(96, format)
    table = random_matrix(0, 37, width, format)
    ids = np.array([0, 36, 15, 16, 17, 36, 3, 31, 32], np.int32)
    with recording(library, threads=2) as r:
        residual = r.floats(np.full((9, width), np.nan))
        library.program_embed(r.program, residual.ctypes.data, r.pack(table), 1.0, None, 0)
        r.fill([(0, 4), (7, 5)], ids=ids)
        assert r.run() == 0
    np.testing.assert_array_equal(residual, exact(table)[ids])


def test_negative_ids_are_rows_of_the_encoder_cache(library: ctypes.CDLL, format: Format) -> None:
    width = whole(96, format)
    table, encoded = random_matrix(0, 37, width, format), random(1, 20, width).astype(np.float32)
    ids = np.array([~0, 36, 0, ~19, ~7, 3], np.int32)
    with recording(library, threads=2) as r:
        residual, cache = r.floats(np.full((6, width), np.nan)), r.floats(encoded)
        library.program_embed(r.program, residual.ctypes.data, r.pack(table), 2.0, cache.ctypes.data, cache.shape[1])
        r.fill([(0, 4), (7, 2)], ids=ids)
        assert r.run() == 0
    np.testing.assert_array_equal(residual[ids < 0], encoded[[0, 19, 7]])
    np.testing.assert_array_equal(residual[ids >= 0], exact(table)[[36, 0, 3]] * np.float32(2))


def test_parts_of_rows_of_the_encoder_cache_are_added(library: ctypes.CDLL) -> None:
    encoded, before = random(1, 20, 3, 70).astype(np.float32), random(2, 6, 70)
    ids = np.array([~0, 36, 0, ~19, ~7, 3], np.int32)
    with recording(library, threads=2) as r:
        residual, cache = r.floats(before), r.floats(encoded)
        for part in (1, 2):
            first = cache.ctypes.data + part * 70 * 4
            library.program_add_encoded(r.program, residual.ctypes.data, 70, first, 3 * 70)
        r.fill([(0, 4), (7, 2)], ids=ids)
        assert r.run() == 0
    expected = before.astype(np.float32)
    for part in (1, 2):
        expected[ids < 0] += encoded[[0, 19, 7], part]
    np.testing.assert_array_equal(residual, expected)


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
