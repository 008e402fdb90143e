"""A matrix in blocks has the bytes that ggml writes and the values that ggml reads."""

from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as np_st

from pipeline.kernels import matrix as matrix_module
from pipeline.kernels.matrix import HAS_MINIMUMS, ZEROS, Matrix, quantize
from pipeline.kernels.stored_matrix import BLOCK_BYTES, BLOCK_COLUMNS, GROUP, Format, row_bytes
from tests.slices import part_of

KINDS: dict[Format, Kind] = {format: Kind[format.upper()] for format in BLOCK_BYTES if format != "fp8"}
"""ggml's formats. It has no fp8."""
FLOATS: list[Format] = ["bf16", "f32"]
BLOCKS: list[Format] = ["q8_0", "q4_1", "q4_0"]
"""Formats that are quantized to."""
HALVES: dict[Format, slice] = {"q6_k": slice(208, 210)} | {
    format: slice(0, 4 if format in HAS_MINIMUMS else 2) for format in KINDS if format != "q6_k"
}
"""Bytes of a block that are float16."""

Array = np.ndarray[Any, Any]
sizes = st.tuples(st.integers(1, 7), st.integers(1, 5))
"""Rows, and groups per row"""


@st.composite
def float_matrices(draw: st.DrawFn) -> Array:
    """Numbers with few digits, so that ties and halves occur, at any scale of float16."""
    rows, groups = draw(sizes)
    numbers = st.one_of(st.integers(-300, 300).map(float), st.floats(-2.0, 2.0, width=16, allow_subnormal=False))
    values = draw(np_st.arrays(np.float32, (rows, groups * GROUP), elements=numbers))
    return values * np.float32(2.0 ** draw(st.integers(-8, 7))) + np.float32(0)  # no -0: the least zero is ambiguous


@st.composite
def block_matrices(draw: st.DrawFn) -> Matrix:
    """Arbitrary codes with finite scales."""
    format = draw(st.sampled_from(list(KINDS)))
    rows, blocks_of_row = draw(sizes)
    seed = draw(st.integers(0, 2**32))  # as many bytes as a K-quant has are too many to draw one by one
    shape = rows, blocks_of_row, BLOCK_BYTES[format]
    blocks = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    num_halves = (HALVES[format].stop - HALVES[format].start) // 2
    halves = draw(np_st.arrays(np.float16, (rows, blocks_of_row, num_halves), elements=st.floats(-6e4, 6e4, width=16)))
    blocks[:, :, HALVES[format]] = halves.view(np.uint8)
    return Matrix(format, torch.from_numpy(blocks.reshape(rows, -1)), rows, blocks_of_row * BLOCK_COLUMNS[format])


@pytest.mark.parametrize("format", BLOCKS)
@settings(max_examples=part_of(40, 15))
@given(values=float_matrices())
def test_blocks_are_those_of_ggml(format: Format, values: Array) -> None:
    assert np.array_equal(quantize(torch.from_numpy(values), format).data, gguf.quantize(values, KINDS[format]))


@pytest.mark.parametrize("format", BLOCKS)
@pytest.mark.parametrize("deviation", [1e-4, 0.02, 30.0])
def test_blocks_of_weights_are_those_of_ggml(format: Format, deviation: float) -> None:
    values = np.random.default_rng(7).normal(0.0, deviation, (48, 320)).astype(np.float32)
    assert np.array_equal(quantize(torch.from_numpy(values), format).data, gguf.quantize(values, KINDS[format]))


@given(block_matrices())
def test_numbers_are_those_of_ggml(matrix: Matrix) -> None:
    expected = gguf.dequantize(matrix.data.numpy(), KINDS[matrix.format])
    assert np.array_equal(matrix.dequantize(torch.float32), expected)
    rounded = torch.from_numpy(expected).to(torch.bfloat16)
    assert torch.equal(matrix.dequantize(torch.bfloat16), rounded)


@given(block_matrices())
def test_values_follow_from_the_codes_and_scales_that_kernels_read(matrix: Matrix) -> None:
    scales, codes = matrix.scales(), matrix.codes()
    in_super_blocks = BLOCK_COLUMNS[matrix.format] > GROUP
    group = 16 if matrix.format == "q6_k" else GROUP
    shape = (matrix.num_rows, matrix.num_columns // group)
    dtype = torch.float32 if in_super_blocks else torch.float16
    assert (scales.shape, scales.dtype) == (shape, dtype)
    assert codes.shape == (matrix.num_rows, matrix.num_columns)
    if matrix.format == "q8_0":
        assert codes.dtype == torch.int8
    else:
        assert codes.dtype == torch.uint8
        assert int(codes.max()) < 2 ** int(matrix.format[1])
    values = (codes.double() - ZEROS.get(matrix.format, 0)) * scales.double().repeat_interleave(group, dim=1)
    if matrix.format in HAS_MINIMUMS:
        assert (matrix.minimums().shape, matrix.minimums().dtype) == (shape, dtype)
        values += matrix.minimums().double().repeat_interleave(group, dim=1)
    assert torch.equal(values.float(), matrix.dequantize(torch.float32))


@pytest.mark.parametrize("format", [format for format in KINDS if format not in BLOCKS])
def test_formats_that_only_files_have_are_not_quantized_to(format: Format) -> None:
    with pytest.raises(ValueError, match=f"{format} is only dequantized"):
        quantize(torch.zeros(1, 256), format)


@settings(max_examples=part_of(40, 15))
@given(values=float_matrices())
def test_the_quantization_error_is_within_the_bound_of_the_format(values: Array) -> None:
    """Half a step, plus the float16 error of scale and minimum; q4_0 clips the side with the smaller numbers."""
    exact = torch.from_numpy(values).double().view(-1, GROUP)
    largest, span = exact.abs().amax(1), exact.amax(1) - exact.amin(1)
    limits: dict[Format, Any] = {"q8_0": largest / 254, "q4_1": span / 30, "q4_0": largest / 8}
    for format, limit in limits.items():
        found = quantize(torch.from_numpy(values), format).dequantize(torch.float64).view(-1, GROUP)
        error = (found - exact).abs().amax(1)
        assert bool((error <= limit * 1.001 + largest * 2**-9 + 1e-6).all()), format


@given(block_matrices(), st.data())
def test_rows_are_taken_in_any_order_and_repeatedly(matrix: Matrix, data: st.DataObject) -> None:
    order = torch.tensor(data.draw(st.lists(st.integers(0, matrix.num_rows - 1), min_size=1, max_size=9)))
    taken = matrix.take_rows(order)
    assert (taken.format, taken.num_rows) == (matrix.format, len(order))
    assert torch.equal(taken.dequantize(torch.float32), matrix.dequantize(torch.float32)[order])


@pytest.mark.parametrize("format", BLOCKS)
def test_large_matrices_are_converted_in_pieces(format: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(23, 3 * GROUP, generator=torch.Generator().manual_seed(1))
    whole = quantize(values, format)
    monkeypatch.setattr(matrix_module, "CHUNK_VALUES", 5 * 3 * GROUP)
    assert torch.equal(quantize(values, format).data, whole.data)
    assert torch.equal(whole.dequantize(torch.float32), whole._rows(slice(0, 23)).dequantize(torch.float32))
    monkeypatch.setattr(matrix_module, "CHUNK_VALUES", 1)
    assert torch.equal(quantize(values, format).data, whole.data)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_floats_are_quantized_from_their_exact_values(dtype: torch.dtype) -> None:
    values = torch.randn(4, GROUP, generator=torch.Generator().manual_seed(2)).to(dtype)
    assert torch.equal(quantize(values, "q4_1").data, quantize(values.float(), "q4_1").data)


@pytest.mark.parametrize("format", BLOCKS)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf"), 3e38, -2e7])
@pytest.mark.parametrize("at", [0, 31])
def test_numbers_outside_of_the_range_of_blocks_are_rejected(format: Format, wrong: float, at: int) -> None:
    values = torch.randn(3, 2 * GROUP)
    values[1, GROUP + at] = wrong
    with pytest.raises(ValueError, match="not finite, or too large"):
        quantize(values, format)


@pytest.mark.parametrize("format", BLOCKS)
@pytest.mark.parametrize("tiny", [0.0, 1e-40, -1e-38, 1e-12])
def test_numbers_too_small_for_a_scale_become_zero(format: Format, tiny: float) -> None:
    values = torch.zeros(1, GROUP)
    values[0, 3] = tiny
    assert torch.equal(quantize(values, format).dequantize(torch.float32), torch.zeros(1, GROUP))


def test_8_bit_floats_are_their_codes_times_the_scales_of_blocks() -> None:
    random = np.random.default_rng(5)
    codes = random.integers(0, 255, (3, 2, 128), np.uint8)
    codes[codes & 127 == 127] = 0  # NaN
    scales = random.normal(0, 1, (3, 2)).astype(np.float32)
    data = np.concatenate([scales[..., None].view(np.uint8), codes], axis=2).reshape(3, -1)
    matrix = Matrix("fp8", torch.from_numpy(data), 3, 256)
    signs, exponents, fractions = np.where(codes >> 7, -1.0, 1.0), codes >> 3 & 15, codes & 7
    numbers = np.where(exponents > 0, (8.0 + fractions) * 2.0 ** (exponents - 10.0), fractions * 2.0**-9)
    expected = (signs * numbers * scales[..., None]).astype(np.float32).reshape(3, 256)
    assert np.array_equal(matrix.dequantize(torch.float32), expected)
    assert torch.equal(matrix.dequantize(torch.bfloat16), torch.from_numpy(expected).bfloat16())
    assert torch.equal(matrix.scales(), torch.from_numpy(scales))
    assert np.array_equal(matrix.codes(), codes.reshape(3, 256))
    assert torch.equal(matrix.take_rows(torch.tensor([2, 0])).data, matrix.data[[2, 0]])


def test_wrong_shapes_and_dtypes_are_rejected() -> None:
    with pytest.raises(ValueError, match="groups of 32, not 33"):
        row_bytes("q8_0", 33)
    with pytest.raises(ValueError, match="groups of 32, not 48"):
        quantize(torch.zeros(2, 48), "q4_0")
    with pytest.raises(ValueError, match=r"a q4_1 matrix of 2 rows and 64 columns is .*\[2, 40\], not .*\[2, 36\]"):
        Matrix("q4_1", torch.zeros(2, 36, dtype=torch.uint8), 2, 64)
    with pytest.raises(ValueError, match=r"bfloat16 \[2, 64\], not torch\.float32"):
        Matrix("bf16", torch.zeros(2, 64), 2, 64)


@pytest.mark.parametrize("format", FLOATS)
def test_floats_have_no_scales_and_are_not_copied(format: Format) -> None:
    matrix = quantize(torch.randn(2, 33), format)
    assert matrix.dequantize(matrix.data.dtype) is matrix.data
    for part in (matrix.scales, matrix.codes, matrix.minimums):
        with pytest.raises(ValueError, match=f"a {format} matrix has no"):
            part()
    with pytest.raises(ValueError, match="a q8_0 matrix has no minimums"):
        quantize(torch.zeros(1, 32), "q8_0").minimums()
