"""Sums of split-k partials, norms, activations, rows of the embedding, and products fused with them."""

import pytest
import torch

from pipeline.kernels.activations import ACTIVATIONS, activation_reference
from pipeline.kernels.rms_norm import layer_norm_reference
from pipeline.kernels.triton.activations import activate, silu_mul
from pipeline.kernels.triton.gemm.fused import norm_linear, norm_swiglu, swiglu
from pipeline.kernels.triton.gemm.linear import num_split_k_partials, split_k_partials_dtype
from pipeline.kernels.triton.gemm.tuned import GemmConfig
from pipeline.kernels.triton.norm import NormWeights, Sublayer, add_norm, embed, take_norm
from tests.kernels.triton.gemms import (
    FORMATS,
    TOLERANCE,
    assert_near,
    columns_of,
    device_matrix,
    gated,
    normed,
    poisoned,
    product,
    random,
)

EPS = 1e-5


def hidden_of(num_tokens: int, width: int, split_k_partials: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """A residual, and its expected new value in float64."""
    residual = random(num_tokens, width, seed=3)
    return residual, residual.double() + (0 if split_k_partials is None else split_k_partials.double().sum(0))


def partials_of(
    num_split_k_partials: int, num_tokens: int, width: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor | None:
    return random(num_split_k_partials, num_tokens, width, seed=4).to(dtype) if num_split_k_partials else None


@pytest.mark.parametrize("num_split_k_partials", [0, 1, 3])
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 576), (5, 33)])
def test_partials_are_added_and_the_sum_is_normed(num_split_k_partials: int, num_tokens: int, width: int) -> None:
    split_k_partials, weight = partials_of(num_split_k_partials, num_tokens, width), random(width, seed=5)
    residual, expected = hidden_of(num_tokens, width, split_k_partials)
    out = poisoned(num_tokens, width, dtype=torch.float32)
    add_norm(out, residual, split_k_partials, NormWeights(weight), EPS)
    assert_near(residual, expected, 1e-6)
    assert_near(out, normed(expected, weight, EPS), 1e-6)


def test_a_single_bfloat16_partial_goes_into_a_bfloat16_norm() -> None:
    split_k_partials, weight = partials_of(1, 3, 64, torch.bfloat16), random(64, seed=5)
    residual, expected = hidden_of(3, 64, split_k_partials)
    out = poisoned(3, 64, dtype=torch.bfloat16)
    add_norm(out, residual, split_k_partials, NormWeights(weight), EPS)
    assert_near(residual, expected, 1e-6)
    assert_near(out, normed(expected, weight, EPS), TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("num_split_k_partials", [0, 2])
def test_sampled_rows_are_normed_and_the_residual_is_unchanged(num_split_k_partials: int) -> None:
    split_k_partials, weight = partials_of(num_split_k_partials, 4, 96), random(96, seed=5)
    residual, expected = hidden_of(4, 96, split_k_partials)
    before, index = residual.clone(), torch.tensor([3, 0, 3], dtype=torch.int32)
    out = poisoned(3, 96, dtype=torch.float32)
    take_norm(out, residual, split_k_partials, index, NormWeights(weight), EPS)
    assert torch.equal(residual, before)
    assert_near(out, normed(expected, weight, EPS)[index.long()], 1e-6)


@pytest.mark.parametrize("format", FORMATS)
def test_rows_of_the_embedding_come_in_any_order(format: str) -> None:
    width, ids = columns_of(format, 160), torch.tensor([3, 19, 3, 0], dtype=torch.int32)
    table = device_matrix(20, width, format, torch.float32)
    residual = poisoned(4, width, dtype=torch.float32)
    embed(residual, table, ids)
    torch.testing.assert_close(residual, table.dequantize()[ids.long()], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("biased", [False, True])
def test_layer_norms_of_all_and_of_some_rows(biased: bool) -> None:
    split_k_partials, weight, bias = partials_of(2, 5, 33), random(33, seed=5), random(33, seed=6) if biased else None
    residual, expected = hidden_of(5, 33, split_k_partials)
    norm, index = NormWeights(weight, bias, centers=True), torch.tensor([3, 0], dtype=torch.int32)
    right = layer_norm_reference(expected, weight, bias, EPS)
    last, out = (poisoned(num, 33, dtype=torch.float32) for num in (2, 5))
    take_norm(last, residual, split_k_partials, index, norm, EPS)
    assert_near(last, right[index.long()], 2e-6)
    add_norm(out, residual, split_k_partials, norm, EPS)
    assert_near(out, right, 2e-6)
    add_norm(residual, residual, None, norm, EPS)  # in place, as for embeddings
    assert_near(residual, right, 2e-6)


@pytest.mark.parametrize("centers", [False, True])
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_a_result_is_normed_and_scaled_before_it_is_added(factor: float, centers: bool) -> None:
    split_k_partials, weight = partials_of(3, 4, 40), random(40, seed=5)
    assert split_k_partials is not None
    bias = random(40, seed=6) if centers else None
    before = Sublayer(NormWeights(weight, bias, centers=centers), factor)
    added = split_k_partials.double().sum(0)
    added = layer_norm_reference(added, weight, bias, EPS) if centers else normed(added, weight, EPS)
    residual, _ = hidden_of(4, 40, None)
    expected, out = residual.double() + added * factor, poisoned(4, 40, dtype=torch.float32)
    add_norm(out, residual, split_k_partials, None, EPS, before)
    assert torch.equal(out, residual)  # without a norm
    assert_near(residual, expected, 2e-6)
    add_norm(None, residual, split_k_partials, None, EPS, before)
    assert_near(residual, expected + added * factor, 2e-6)


@pytest.mark.parametrize("format", ["float", "q8_0"])
def test_embeddings_have_a_factor_and_positions(format: str) -> None:
    ids, positions = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([3, 19, 3], [7, 0, 2]))
    table, learned = (device_matrix(20, 64, format, torch.float32, seed=seed) for seed in (1, 2))
    residual = poisoned(3, 64, dtype=torch.float32)
    embed(residual, table, ids, 6.5, learned, positions, 2)
    right = table.dequantize()[ids.long()] * 6.5 + learned.dequantize()[positions.long() + 2]
    torch.testing.assert_close(residual, right, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations(kind: str) -> None:
    numbers = torch.cat([torch.linspace(-12, 12, 97), torch.tensor([-200.0, 200.0, 0.0])]).repeat(2)
    split_k_partials = torch.stack([numbers * 0.25, numbers * 0.75])[:, None]
    out = poisoned(1, 200, dtype=torch.float32)
    activate(out, split_k_partials, kind, gated=False)
    right = activation_reference(numbers, kind)
    torch.testing.assert_close(out[0].double(), right, rtol=2e-6, atol=1e-6)
    gated = poisoned(1, 100, dtype=torch.float32)
    activate(gated, split_k_partials, kind, gated=True)
    torch.testing.assert_close(gated[0].double(), right[:100] * numbers[100:].double(), rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("num_split_k_partials", [1, 3])
@pytest.mark.parametrize("width", [40, 1100])
def test_swiglu_uses_the_sum_of_its_partials(num_split_k_partials: int, width: int) -> None:
    split_k_partials = partials_of(num_split_k_partials, 3, 2 * width)
    assert split_k_partials is not None
    split_k_partials[:, 0, 0] = -200.0 / num_split_k_partials  # exp(200) is infinite
    out = poisoned(3, width, dtype=torch.float32)
    silu_mul(out, split_k_partials)
    assert_near(out, gated(split_k_partials.double().sum(0)), 1e-6)


@pytest.mark.parametrize("format", ["float", "int4", "q8_0"])
@pytest.mark.parametrize("num_tokens", [1, 3, 16])
@pytest.mark.parametrize("num_partials_in", [0, 2])
def test_a_product_fused_with_the_norm_of_its_input(format: str, num_tokens: int, num_partials_in: int) -> None:
    rows, columns, dtype = 22, 160, torch.float32
    matrix, bias, weight = device_matrix(rows, columns, format, dtype), random(rows, seed=2), random(columns, seed=5)
    parts_in = partials_of(num_partials_in, num_tokens, columns)
    residual, hidden = hidden_of(num_tokens, columns, parts_in)
    before, residual_out = residual.clone(), poisoned(num_tokens, columns, dtype=dtype)
    expected = product(normed(hidden, weight, EPS), matrix, bias)

    split_k_partials = poisoned(
        num_split_k_partials(matrix, num_tokens), num_tokens, rows, dtype=split_k_partials_dtype(matrix, num_tokens)
    )
    norm_linear(split_k_partials, residual_out, residual, parts_in, weight, EPS, matrix, bias)
    assert_near(split_k_partials.double().sum(0), expected, 2e-5)
    if parts_in is not None:
        assert_near(residual_out, hidden, 1e-6)
        residual_out.fill_(torch.nan)

    out = poisoned(num_tokens, rows // 2, dtype=dtype)
    norm_swiglu(out, residual_out, residual, parts_in, weight, EPS, matrix, bias)
    assert_near(out, gated(expected), 2e-5)
    if parts_in is not None:
        assert_near(residual_out, hidden, 1e-6)
    else:
        assert bool(residual_out.isnan().all())
    assert torch.equal(residual, before)


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_a_fused_norm_reads_all_columns_of_a_split_k_product(num_tokens: int) -> None:
    matrix, weight = device_matrix(6, 150, "float", torch.float32), random(150, seed=5)
    parts_in = partials_of(2, num_tokens, 150)
    residual, hidden = hidden_of(num_tokens, 150, parts_in)
    split_k_partials, residual_out = (
        poisoned(3, num_tokens, 6, dtype=torch.float32),
        poisoned(num_tokens, 150, dtype=torch.float32),
    )
    config = GemmConfig(1 if num_tokens == 1 else 8, 4 if num_tokens == 1 else 16, 64, 3, 4, 2)
    norm_linear(split_k_partials, residual_out, residual, parts_in, weight, EPS, matrix, None, config)
    assert_near(split_k_partials.sum(0), product(normed(hidden, weight, EPS), matrix, None), 2e-5)
    assert_near(residual_out, hidden, 1e-6)


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_swiglu_in_bfloat16_without_a_norm(num_tokens: int) -> None:
    matrix, x = device_matrix(24, 128, "float", torch.bfloat16), random(num_tokens, 128, seed=1).bfloat16()
    out = poisoned(num_tokens, 12, dtype=torch.bfloat16)
    swiglu(out, x, matrix, None)
    assert_near(out, gated(product(x, matrix, None)), TOLERANCE[torch.bfloat16])
