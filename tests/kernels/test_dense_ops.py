"""Each op on whole rows agrees with its reference."""

import pytest
import torch

from pipeline.kernels.linear import TILE_ELEMENTS, linear, linear_reference, linear_upcast
from pipeline.kernels.logits import logits, logits_upcast
from pipeline.kernels.rms_norm import add, rms_norm, rms_norm_reference
from pipeline.kernels.silu_mul import silu_mul, silu_mul_reference
from pipeline.kernels.take_rows import take_rows, take_rows_reference

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
DTYPES = list(TOLERANCE)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 7])
def test_rms_norm_agrees_with_its_formula(dtype: torch.dtype, num_rows: int) -> None:
    x, weight = random(num_rows, 96, dtype=dtype), random(96, dtype=dtype, seed=1)
    out = torch.empty_like(x)
    rms_norm(out, x, weight, 1e-5)
    assert_close(out, rms_norm_reference(x, weight, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_float32_residual_adds_any_dtype_without_rounding(dtype: torch.dtype) -> None:
    residual, x = random(5, 64), random(5, 64, dtype=dtype, seed=1)
    expected = residual + x.float()
    add(residual, x)
    assert torch.equal(residual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_agrees_with_its_formula(dtype: torch.dtype) -> None:
    gate_up = random(6, 80, dtype=dtype) * 4
    out = torch.empty(6, 40, dtype=dtype)
    silu_mul(out, gate_up)
    torch.testing.assert_close(
        out.double(), silu_mul_reference(gate_up), rtol=2e-2 if dtype != torch.float32 else 1e-5, atol=1e-5
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_take_rows_returns_rows_in_any_order_as_float32(dtype: torch.dtype) -> None:
    table, index = random(20, 8, dtype=dtype), torch.tensor([3, 19, 3, 0])
    out = torch.empty(4, 8)
    take_rows(out, table, index)
    assert torch.equal(out, take_rows_reference(table, index).float())


@pytest.mark.parametrize("op", [linear, linear_upcast])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 17])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_agrees_with_its_formula(op, dtype: torch.dtype, num_rows: int, biased: bool) -> None:
    x, weight = random(num_rows, 48, dtype=dtype), random(70, 48, dtype=dtype, seed=1) / 48**0.5
    bias = random(70, dtype=dtype, seed=2) if biased else None
    out = torch.empty(num_rows, 70, dtype=dtype)
    op(out, x, weight, bias)
    assert_close(out, linear_reference(x, weight, bias), dtype)


def test_a_dequantized_product_of_several_tiles_is_in_order() -> None:
    width = 4096
    num_outputs = TILE_ELEMENTS // width + 3
    x, weight = random(4, width, dtype=torch.bfloat16), random(num_outputs, width, dtype=torch.bfloat16, seed=1) / 64
    bias = random(num_outputs, dtype=torch.bfloat16, seed=2)
    out = torch.empty(4, num_outputs, dtype=torch.bfloat16)
    linear_upcast(out, x, weight, bias)
    assert_close(out, linear_reference(x, weight, bias), torch.bfloat16)


@pytest.mark.parametrize("op", [logits, logits_upcast])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 9])
def test_the_largest_bfloat16_logits_are_exact_to_float32(op, num_rows: int) -> None:
    x, weight = random(num_rows, 64, dtype=torch.bfloat16), random(500, 64, dtype=torch.bfloat16, seed=1)
    out = torch.empty(num_rows, 500)
    op(out, x, weight)
    expected = linear_reference(x, weight, None)
    assert_close(out, expected, torch.bfloat16)
    assert torch.equal(out.argmax(-1), expected.argmax(-1))
    largest = expected.topk(8, dim=-1).indices
    assert_close(out.gather(1, largest), expected.gather(1, largest), torch.float32)


def test_float32_logits_agree_with_the_formula() -> None:
    x, weight = random(3, 64), random(50, 64, seed=1)
    out = torch.empty(3, 50)
    logits(out, x, weight)
    assert_close(out, linear_reference(x, weight, None), torch.float32)
