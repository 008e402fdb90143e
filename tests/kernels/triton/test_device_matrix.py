"""Weights in device layout have the same values as before."""

import pytest
import torch

from pipeline.kernels.matrix import Matrix, quantize
from pipeline.kernels.stored_matrix import Format
from pipeline.kernels.triton.gemm import device_matrix as device_matrix_module
from pipeline.kernels.triton.gemm.dequantize import dequantize_rows
from pipeline.kernels.triton.gemm.device_matrix import DeviceMatrix, to_int4, to_int8
from tests.k_quants import quantize as quantize_any
from tests.kernels.triton.gemms import random


@pytest.mark.parametrize("format", ["q8_0", "q4_0", "q4_1"])
def test_blocks_become_planes_of_the_same_numbers(format: Format) -> None:
    first, second = (quantize(random(num, 96, seed=num), format) for num in (5, 8))
    joined = DeviceMatrix.of([first, second], torch.float32, "cpu")
    expected = torch.cat([first.dequantize(torch.float32), second.dequantize(torch.float32)])
    torch.testing.assert_close(joined.dequantize(), expected, rtol=1e-6, atol=1e-7)
    assert (joined.num_rows, joined.num_columns, joined.group) == (13, 96, 32)
    out = torch.full((6, 96), torch.nan)
    dequantize_rows(out, joined, 4)
    torch.testing.assert_close(out, expected[4:10], rtol=1e-6, atol=1e-7)


def test_matrices_of_several_formats_become_floats() -> None:
    numbers = random(4, 64, seed=1)
    joined = DeviceMatrix.of([quantize(numbers, "q8_0"), Matrix("f32", numbers, 4, 64)], torch.bfloat16, "cpu")
    assert joined.form == "float"
    assert joined.values.dtype == torch.bfloat16
    assert torch.equal(joined.values[4:], numbers.bfloat16())


def test_matrices_of_other_widths_are_rejected() -> None:
    matrices = [Matrix("f32", torch.zeros(2, width), 2, width) for width in (32, 64)]
    with pytest.raises(ValueError, match=r"\[32, 64\] columns"):
        DeviceMatrix.of(matrices, torch.float32, "cpu")


@pytest.mark.parametrize(("quantization", "worst"), [("int8", 0.008), ("int4", 0.11)])
@pytest.mark.parametrize("num_columns", [384, 576, 96, 75])
def test_floats_become_codes_in_groups_that_fit(
    quantization: device_matrix_module.Quantization, worst: float, num_columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_matrix_module, "CHUNK_VALUES", 7 * num_columns)
    numbers = random(30, num_columns, seed=2)
    matrix = DeviceMatrix.of([Matrix("f32", numbers, 30, num_columns)], torch.bfloat16, "cpu", quantization)
    assert matrix.group == {384: 128, 576: 64, 96: 32, 75: 32}[num_columns]
    made = matrix.dequantize()
    assert made.shape == numbers.shape
    assert float((made - numbers).norm() / numbers.norm()) < worst
    bits = {"int8": 8, "int4": 4}[quantization]
    assert matrix.values.numel() * 8 == 30 * -(-num_columns // matrix.group) * matrix.group * bits


def test_int4_error_is_below_that_of_min_max_scaling() -> None:
    groups = random(200, 128, seed=3)
    scale, minimum, code = to_int4(groups)
    error = (code.float() * scale.float()[:, None] + minimum.float()[:, None] - groups).norm()
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    step = (high - low) / 15
    assert error < 0.97 * (((groups - low) / step).round() * step + low - groups).norm()


def test_groups_of_one_number_and_of_zeros_are_exact() -> None:
    groups = torch.stack([torch.zeros(64), torch.full((64,), 0.25), torch.full((64,), -3.0)])
    scale, minimum, code = to_int4(groups)
    assert torch.equal(code.float() * scale.float()[:, None] + minimum.float()[:, None], groups)
    scale, code = to_int8(groups)
    torch.testing.assert_close(code.float() * scale.float()[:, None], groups, rtol=1e-3, atol=0)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan, 1e9])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_numbers_beyond_the_range_of_a_scale_are_rejected(
    bad: float, quantization: device_matrix_module.Quantization
) -> None:
    numbers = random(2, 64, seed=4)
    numbers[1, 3] = bad
    with pytest.raises(ValueError, match="not finite, or too large"):
        DeviceMatrix.of([Matrix("f32", numbers, 2, 64)], torch.float32, "cpu", quantization)


@pytest.mark.parametrize("format", ["q4_k", "q5_k", "q6_k", "q5_0", "q5_1"])
def test_blocks_that_the_kernels_do_not_read_become_floats(format: Format) -> None:
    values = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    matrix = quantize_any(values, format)
    found = DeviceMatrix.of([matrix], torch.bfloat16, "cpu")
    assert (found.form, found.num_rows, found.num_columns) == ("float", 4, 256)
    assert torch.equal(found.values, matrix.dequantize(torch.bfloat16))
