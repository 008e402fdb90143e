"""Matrices in every format, and references of products and norms in float64."""

import torch

from pipeline.kernels.matrix import Matrix
from pipeline.kernels.rms_norm import rms_norm_reference
from pipeline.kernels.stored_matrix import SUPER_BLOCK, Format
from pipeline.kernels.triton.gemm.device_matrix import FP8_GROUP, DeviceMatrix
from tests.k_quants import quantize

BLOCKS: tuple[Format, ...] = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k")
"""Formats of files."""
K_QUANTS: tuple[Format, ...] = ("q4_k", "q5_k", "q6_k")
FORMATS = ("float", "int8", "int4", "fp8", *BLOCKS)

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Relative errors. The interpreter truncates to bfloat16 instead of rounding, so all errors have the same sign."""


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def device_matrix(num_rows: int, num_columns: int, format: str, dtype: torch.dtype, *, seed: int = 0) -> DeviceMatrix:
    weight = random(num_rows, num_columns, seed=seed) / num_columns**0.5
    match format:
        case "float":
            return DeviceMatrix.of([Matrix("f32", weight, num_rows, num_columns)], dtype, "cpu")
        case "int8" | "int4":
            return DeviceMatrix.of([Matrix("f32", weight, num_rows, num_columns)], dtype, "cpu", format)
        case "fp8":
            return fp8_matrix(weight, dtype)
    return DeviceMatrix.of([block_matrix(num_rows, num_columns, format, seed=seed)], dtype, "cpu")


def columns_of(format: str, least: int) -> int:
    """The smallest number of columns, at least this many, that a format has."""
    step = FP8_GROUP if format == "fp8" else SUPER_BLOCK if format in K_QUANTS else 1
    return -(-least // step) * step


def fp8_matrix(weight: torch.Tensor, dtype: torch.dtype) -> DeviceMatrix:
    """Quantize with a scale per row and 128 columns; K is a multiple of 128."""
    num_rows, num_columns = weight.shape
    groups = weight.view(num_rows, -1, FP8_GROUP)
    scales = groups.abs().amax(dim=2) / 448
    codes = (groups / scales[:, :, None]).to(torch.float8_e4m3fn).view(torch.uint8).view(weight.shape)
    return DeviceMatrix("fp8", codes, scales, None, 0, FP8_GROUP, dtype, num_rows, num_columns)


def block_matrix(num_rows: int, num_columns: int, format: str, *, seed: int = 0) -> Matrix:
    """Random weights in one of `BLOCKS`."""
    (wanted,) = (each for each in BLOCKS if each == format)
    return quantize(random(num_rows, num_columns, seed=seed) / num_columns**0.5, wanted)


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory of NaN, to find elements that are not written."""
    return torch.full(shape, torch.nan, dtype=dtype)


def product(x: torch.Tensor, matrix: DeviceMatrix, bias: torch.Tensor | None) -> torch.Tensor:
    out = x.double() @ matrix.dequantize().double().T
    return out if bias is None else out + bias.double()


def normed(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return rms_norm_reference(hidden, weight, eps)


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def assert_near(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Every number is finite, and each row is close to the expected one as a whole."""
    assert actual.shape == expected.shape
    assert bool(actual.isfinite().all())
    for row, expected_row in zip(actual, expected, strict=True):
        assert relative_error(row, expected_row) < tolerance
