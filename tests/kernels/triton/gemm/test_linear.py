"""Products of every format and number of tokens agree with float64."""

import pytest
import torch

from pipeline.kernels.triton.gemm import linear as linear_module
from pipeline.kernels.triton.gemm.linear import (
    launch_gemm,
    linear,
    logits,
    num_split_k_partials,
    split_k_partials_dtype,
)
from pipeline.kernels.triton.gemm.tuned import GemmConfig
from tests.kernels.triton.gemms import (
    BLOCKS,
    K_QUANTS,
    TOLERANCE,
    assert_near,
    columns_of,
    device_matrix,
    poisoned,
    product,
    random,
)


def check(num_tokens: int, num_rows: int, num_columns: int, format: str, dtype: torch.dtype, *, biased: bool) -> None:
    matrix = device_matrix(num_rows, num_columns, format, dtype)
    x = random(num_tokens, num_columns, seed=1).to(dtype)
    bias = random(num_rows, seed=2) if biased else None
    split_k_partials = poisoned(
        num_split_k_partials(matrix, num_tokens), num_tokens, num_rows, dtype=split_k_partials_dtype(matrix, num_tokens)
    )
    linear(split_k_partials, x, matrix, bias)
    assert_near(split_k_partials.double().sum(0), product(x, matrix, bias), TOLERANCE[dtype])


@pytest.mark.parametrize("format", ["float", "int8", "int4", "q4_1"])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 16, 17, 40])
def test_a_product_agrees_with_float64(format: str, num_tokens: int) -> None:
    check(num_tokens, 21, 160, format, torch.float32, biased=num_tokens % 2 == 1)


@pytest.mark.parametrize("format", ["fp8", "q8_0", "q4_0", "q5_0", "q5_1", *K_QUANTS])
@pytest.mark.parametrize("num_tokens", [1, 5, 17])
def test_a_product_of_any_format_agrees_with_float64(format: str, num_tokens: int) -> None:
    check(num_tokens, 13, columns_of(format, 288), format, torch.float32, biased=num_tokens % 2 == 1)


@pytest.mark.parametrize("format", [*BLOCKS, "fp8"])
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_weights_are_multiplied_with_their_exact_values(format: str, num_tokens: int) -> None:
    """The result for tokens that are zero but for one number are columns of the weight."""
    matrix = device_matrix(6, columns_of(format, 64), format, torch.float32)
    wanted = torch.tensor([17, 42, 9])[:num_tokens]
    x = torch.nn.functional.one_hot(wanted, matrix.num_columns).float()
    out = poisoned(num_split_k_partials(matrix, num_tokens), num_tokens, 6, dtype=torch.float32)
    linear(out, x, matrix, None)
    assert torch.equal(out.sum(0), matrix.dequantize()[:, wanted].T)


@pytest.mark.parametrize("format", ["float", "int8", "int4", "fp8", "q5_0", "q4_k", "q6_k"])
@pytest.mark.parametrize("num_tokens", [1, 5, 17])
def test_bfloat16_inputs_are_summed_in_float32(format: str, num_tokens: int) -> None:
    check(num_tokens, 19, columns_of(format, 576), format, torch.bfloat16, biased=True)


@pytest.mark.parametrize("format", ["float", "int8", "int4"])
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_odd_numbers_of_columns(format: str, num_tokens: int) -> None:
    check(num_tokens, 9, 75, format, torch.float32, biased=False)


@pytest.mark.parametrize("format", ["float", "q4_1", "q5_k"])
@pytest.mark.parametrize("num_tokens", [1, 6])
def test_split_k_partials_add_the_bias_once(format: str, num_tokens: int) -> None:
    matrix = device_matrix(21, 300 if format == "float" else columns_of(format, 320), format, torch.float32)
    bias = random(21, seed=2)
    x = random(num_tokens, matrix.num_columns, seed=1)
    config = GemmConfig(1 if num_tokens == 1 else 8, 16, 64, 3, 4, 2)
    split_k_partials = poisoned(3, num_tokens, 21, dtype=torch.float32)
    launch_gemm("linear", split_k_partials, x, matrix, bias, config)
    assert_near(split_k_partials.double().sum(0), product(x, matrix, bias), 2e-5)
    assert all(bool(part.any()) for part in split_k_partials)


@pytest.mark.parametrize("format", ["int8", "int4", "q4_0", "q4_1", "q6_k"])
def test_codes_of_many_tokens_are_dequantized_a_few_rows_at_a_time(
    format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_module, "CODE_TOKENS", 16)
    matrix, x, bias = device_matrix(37, 256, format, torch.float32), random(18, 256, seed=1), random(37, seed=2)
    split_k_partials = poisoned(1, 18, 37, dtype=torch.float32)
    linear(split_k_partials, x, matrix, bias, wide=poisoned(256 * 10 + 5, dtype=torch.float32))
    assert_near(split_k_partials[0], product(x, matrix, bias), 2e-5)


@pytest.mark.parametrize("format", ["float", "int4"])
@pytest.mark.parametrize("num_samples", [1, 6, 17])
def test_logits_of_bfloat16_are_not_rounded(format: str, num_samples: int) -> None:
    matrix, x = device_matrix(25, 64, format, torch.bfloat16), random(num_samples, 64, seed=1).bfloat16()
    out = poisoned(num_samples, 25, dtype=torch.float32)
    logits(out, x, matrix)
    # With several tokens, codes become bfloat16 before they are multiplied.
    assert_near(out, product(x, matrix, None), 2e-5 if format == "float" or num_samples == 1 else 1e-2)


def test_a_product_is_deterministic() -> None:
    matrix, x = device_matrix(20, 1024, "int4", torch.float32), random(3, 1024, seed=1)
    first, second = (poisoned(num_split_k_partials(matrix, 3), 3, 20, dtype=torch.float32) for _ in range(2))
    linear(first, x, matrix, None)
    linear(second, x, matrix, None)
    assert torch.equal(first, second)


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    """Padding rows may hold anything, also NaN and infinity."""
    matrix, x = device_matrix(20, 64, "float", torch.float32), random(4, 64, seed=1)
    x[2] = torch.nan
    split_k_partials = torch.zeros(num_split_k_partials(matrix, 4), 4, 20)
    linear(split_k_partials, x, matrix, None)
    good = [0, 1, 3]
    assert_near(split_k_partials.sum(0)[good], product(x[good], matrix, None), 2e-5)
