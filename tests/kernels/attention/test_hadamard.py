"""The Hadamard transform of heads keeps the products of queries and keys, and spreads large numbers."""

import pytest
import torch

from pipeline.kernels.attention.hadamard import hadamard_reference, transform_heads
from pipeline.kernels.attention.kv_layout import dequantize_heads, quantize_heads

HEAD_DIMS = [16, 48, 64, 80, 96, 128, 256]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_it_is_its_matrix_which_is_orthonormal_and_symmetric(head_dim: int) -> None:
    matrix = hadamard_reference(head_dim)
    torch.testing.assert_close(matrix @ matrix, torch.eye(head_dim, dtype=torch.float64))
    assert torch.equal(matrix, matrix.T)
    heads = torch.randn(5, 3, head_dim)
    torch.testing.assert_close(transform_heads(heads).double(), heads.double() @ matrix, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_scores_stay_and_an_outlier_costs_less_in_8_bits(head_dim: int) -> None:
    queries, keys = torch.randn(2, 50, head_dim).unbind()
    keys[:, 3] *= 30
    exact = queries.double() @ keys.double().T
    turned = transform_heads(queries), transform_heads(keys)
    torch.testing.assert_close(turned[0].double() @ turned[1].double().T, exact, rtol=1e-5, atol=1e-3)
    plain, spread = (
        (q.double() @ dequantize_heads(*quantize_heads(k)).double().T - exact).square().mean().sqrt()
        for q, k in ((queries, keys), turned)
    )
    assert spread < plain * (0.75 if head_dim & -head_dim == 16 else 0.5)
