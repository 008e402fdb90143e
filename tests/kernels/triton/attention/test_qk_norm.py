"""Norms of all heads of queries or keys together, or of each, against their formulas in float64."""

import pytest
import torch

from pipeline.kernels.rms_norm import layer_norm_reference, rms_norm_reference
from pipeline.kernels.triton.attention.qk_norm import QkNormWeights, qk_norm
from pipeline.kernels.triton.logits import finish_logits
from tests.kernels.triton.gemms import assert_near, poisoned, random

EPS = 1e-5
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 24


@pytest.mark.parametrize("num_partials", [1, 3])
@pytest.mark.parametrize(("together", "centers"), [(True, False), (True, True), (False, False), (False, True)])
def test_queries_and_keys_are_normed(together: bool, centers: bool, num_partials: int) -> None:
    sizes = [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM]
    split_k_partials = random(num_partials, 5, sum(sizes), seed=1) * 3 + 0.5
    weights = random(sizes[0], seed=2), random(sizes[1], seed=3)
    out = poisoned(1, 5, sum(sizes), dtype=torch.float32)
    qk_norm(out, split_k_partials, QkNormWeights(*weights, EPS, together=together, centers=centers), HEAD_DIM)
    *parts, values = split_k_partials.double().sum(0).split(sizes, dim=1)
    for i, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        shape = (5, -1) if together else (5, -1, HEAD_DIM)
        numbers, shaped = part.reshape(shape), weight if together else weight.view(-1, HEAD_DIM)
        norm = layer_norm_reference(numbers, shaped, None, EPS) if centers else rms_norm_reference(numbers, shaped, EPS)
        assert_near(out[0].split(sizes, dim=1)[i], norm.reshape(5, -1), 3e-6)
    assert_near(out[0, :, -sizes[2] :], values, 1e-6)


@pytest.mark.parametrize(("biased", "scale", "cap"), [(True, 1.0, None), (False, 0.25, None), (True, 2.0, 3.0)])
def test_logits_get_a_bias_a_factor_and_a_cap(biased: bool, scale: float, cap: float | None) -> None:
    logits, bias = random(3, 1100, seed=1) * 4, random(1100, seed=2) if biased else None
    right = (logits.double() + (0 if bias is None else bias.double())) * scale
    right = right if cap is None else cap * torch.tanh(right / cap)
    finish_logits(logits, bias, scale, cap)
    assert_near(logits, right, 1e-6)
