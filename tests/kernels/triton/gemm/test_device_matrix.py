"""Weights in device layout have the same values as before."""

import gguf
import pytest
import torch

from pipeline.kernels.matrix import Matrix, quantize
from pipeline.kernels.stored_matrix import BLOCK_BYTES, GPU_BLOCK_BYTES, Format, row_bytes
from pipeline.kernels.triton.gemm import device_matrix as device_matrix_module
from pipeline.kernels.triton.gemm.dequantize import dequantize_rows
from pipeline.kernels.triton.gemm.device_matrix import FP8_GROUP, DeviceMatrix
from pipeline.kernels.triton.gemm.quantize import to_int4, to_int8
from tests import k_quants
from tests.kernels.triton.gemms import BLOCKS, K_QUANTS, block_matrix, random


@pytest.mark.parametrize("format", BLOCKS)
def test_blocks_become_planes_of_the_numbers_of_gguf(format: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_matrix_module, "CHUNK_VALUES", 3 * 512)
    first, second = (block_matrix(num, 512, format, seed=num) for num in (5, 8))
    joined = DeviceMatrix.of([first, second], torch.float32, "cpu")
    kind = gguf.GGMLQuantizationType[format.upper()]
    expected = torch.cat([torch.from_numpy(gguf.dequantize(each.data.numpy(), kind)) for each in (first, second)])
    assert torch.equal(joined.dequantize(), expected)
    assert (joined.num_rows, joined.num_columns, joined.group) == (13, 512, 32)
    out = torch.full((6, 512), torch.nan)
    dequantize_rows(out, joined, 4)
    assert torch.equal(out, expected[4:10])


@pytest.mark.parametrize("format", K_QUANTS)
def test_all_scales_and_codes_of_k_quants_are_exact(format: Format) -> None:
    """Random bytes have them all; the factors are finite float16 of both signs."""
    generator = torch.Generator().manual_seed(1)
    data = torch.randint(0, 256, (40, row_bytes(format, 512)), generator=generator, dtype=torch.uint8)
    blocks = data.view(40, 2, -1)
    halves = (torch.randn(40, 2, 2, generator=generator) / 100).half().view(torch.uint8)
    if format == "q6_k":
        blocks[:, :, 208:] = halves[:, :, :2]
    else:
        blocks[:, :, :4] = halves
    expected = torch.from_numpy(gguf.dequantize(data.numpy(), gguf.GGMLQuantizationType[format.upper()]))
    matrix = DeviceMatrix.of([Matrix(format, data, 40, 512)], torch.float32, "cpu")
    assert torch.equal(matrix.dequantize(), expected)
    out = torch.full((40, 512), torch.nan)
    dequantize_rows(out, matrix, 0)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("format", BLOCKS)
def test_memory_is_hardly_more_than_the_files(format: Format) -> None:
    matrix = block_matrix(3, 768, format)
    planes = DeviceMatrix.of([matrix], torch.bfloat16, "cpu")
    assert planes.num_bytes == matrix.data.numel() // BLOCK_BYTES[format] * GPU_BLOCK_BYTES[format]
    assert planes.num_bytes <= 1.03 * matrix.data.numel()


def test_matrices_of_several_formats_are_not_joined() -> None:
    numbers = random(4, 64, seed=1)
    matrices = [quantize(numbers, "q8_0"), Matrix("f32", numbers, 4, 64)]
    with pytest.raises(ValueError, match=r"\['q8_0', 'f32'\]"):
        DeviceMatrix.of(matrices, torch.bfloat16, "cpu")


def test_fp8_weights_are_exact() -> None:
    """All codes but NaN."""
    codes = (torch.arange(30 * 256) % 127 | (torch.arange(30 * 256) % 2 << 7)).to(torch.uint8).view(30, 256)
    scales = random(30, 2, seed=1).abs() / 7
    matrix = DeviceMatrix("fp8", codes, scales, None, 0, FP8_GROUP, torch.float32, 30, 256)
    expected = codes.view(torch.float8_e4m3fn).float() * scales.repeat_interleave(128, 1)
    assert torch.equal(matrix.dequantize(), expected)
    out = torch.full((30, 256), torch.nan)
    dequantize_rows(out, matrix, 0)
    assert torch.equal(out, expected)


def test_fp8_blocks_keep_their_numbers_and_their_size() -> None:
    blocks = [k_quants.quantize(random(num, 256, seed=num), "fp8") for num in (5, 8)]
    joined = DeviceMatrix.of(blocks, torch.float32, "cpu")
    assert (joined.format, joined.num_rows, joined.num_columns) == ("fp8g128", 13, 256)
    assert joined.num_bytes == sum(each.data.numel() for each in blocks)
    expected = torch.cat([each.dequantize(torch.float32) for each in blocks])
    assert torch.equal(joined.dequantize(), expected)
    out = torch.full((13, 256), torch.nan)
    dequantize_rows(out, joined, 0)
    assert torch.equal(out, expected)


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


def test_blocks_that_the_kernels_do_not_read_become_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(GPU_BLOCK_BYTES, "q5_k")
    matrix = block_matrix(4, 256, "q5_k")
    found = DeviceMatrix.of([matrix], torch.bfloat16, "cpu")
    assert (found.form, found.num_rows, found.num_columns) == ("float", 4, 256)
    assert torch.equal(found.values, matrix.dequantize(torch.bfloat16))
