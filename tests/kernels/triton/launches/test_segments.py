"""Products of matrices whose rows have several formats agree with float64."""

import pytest
import torch

from pipeline.kernels.matrix import Matrix
from pipeline.kernels.triton.gemm import linear as linear_module
from pipeline.kernels.triton.gemm.segments import (
    SegmentedMatrix,
    num_split_k_partials,
    segmented_linear,
    segmented_norm_linear,
    split_k_partials_dtype,
)
from tests.kernels.triton.gemms import assert_near, block_matrix, normed, poisoned, random

EPS = 1e-5


def segmented(num_columns: int = 512) -> SegmentedMatrix:
    """Q of two matrices, K of floats and V of another format."""
    floats = (random(7, num_columns, seed=3) / num_columns**0.5).bfloat16()
    matrices = [
        block_matrix(4, num_columns, "q4_k", seed=1),
        block_matrix(8, num_columns, "q4_k", seed=2),
        Matrix("bf16", floats, 7, num_columns),
        block_matrix(5, num_columns, "q6_k", seed=4),
    ]
    return SegmentedMatrix.of(matrices, torch.float32, "cpu")


def product(x: torch.Tensor, matrix: SegmentedMatrix, bias: torch.Tensor | None) -> torch.Tensor:
    weight = torch.cat([segment.dequantize() for segment in matrix.segments]).double()
    return x.double() @ weight.T + (0 if bias is None else bias.double())


def test_neighbours_of_one_format_are_one_segment() -> None:
    matrix = segmented()
    assert [(segment.format, segment.num_rows) for segment in matrix.segments] == [
        ("q4_k", 12),
        ("f32", 7),
        ("q6_k", 5),
    ]
    assert (matrix.num_rows, matrix.num_columns, matrix.has_codes) == (24, 512, True)
    assert matrix.largest is matrix.segments[0]


@pytest.mark.parametrize("num_tokens", [1, 3, 17, 20])
def test_segments_write_their_columns(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 17 tokens codes have our own kernels and floats those of torch; 20 are made many here."""
    monkeypatch.setattr(linear_module, "CODE_TOKENS", 17)
    matrix, bias, x = segmented(), random(24, seed=5), random(num_tokens, 512, seed=6)
    out = poisoned(num_split_k_partials(matrix, num_tokens), num_tokens, 24, dtype=torch.float32)
    assert split_k_partials_dtype(matrix, num_tokens) == torch.float32
    segmented_linear(out, x, matrix, bias, wide=poisoned(512 * 5, dtype=torch.float32))
    assert_near(out.double().sum(0), product(x, matrix, bias), 2e-5)


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_all_segments_have_the_same_split(num_tokens: int) -> None:
    """Also if a segment has fewer tiles of columns, so that some of its programs have none."""
    matrix, bias, x = segmented(), random(24, seed=5), random(num_tokens, 512, seed=6)
    out = poisoned(3, num_tokens, 24, dtype=torch.float32)
    segmented_linear(out, x, matrix, bias)
    assert_near(out.double().sum(0), product(x, matrix, bias), 2e-5)


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_every_segment_computes_the_norm(num_tokens: int) -> None:
    matrix = segmented()
    residual, partials, weight = (
        random(num_tokens, 512, seed=1),
        random(2, num_tokens, 512, seed=2),
        random(512, seed=3),
    )
    out = poisoned(num_split_k_partials(matrix, num_tokens), num_tokens, 24, dtype=torch.float32)
    left = poisoned(num_tokens, 512, dtype=torch.float32)
    segmented_norm_linear(out, left, residual, partials, weight, EPS, matrix, None)
    hidden = residual + partials.sum(0)
    torch.testing.assert_close(left, hidden)
    assert_near(out.double().sum(0), product(normed(hidden, weight, EPS), matrix, None), 2e-5)
