"""Mixtures of experts: choices, their order, the products of each expert in every format, and their sums."""

import pytest
import torch

from pipeline.kernels.experts import ExpertActivation, ExpertMatrices, RouteForm, experts_reference, route_reference
from pipeline.kernels.triton.experts import combine, down, gate_up, route, sort
from tests.kernels.triton.gemms import FORMATS, TOLERANCE, assert_near, columns_of, device_matrix, poisoned, random

NUM, CHOICES = 5, 3


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_a_router_chooses_the_largest_scores(num_tokens: int, normalized: bool) -> None:
    partials = random(2, num_tokens, NUM + 1, seed=1) * 2
    partials[:, 0] = 1.0  # all equal
    chosen = torch.full((num_tokens, CHOICES), -1, dtype=torch.int32)
    weights = poisoned(num_tokens, CHOICES, dtype=torch.float32)
    route(chosen, weights, partials, NUM, 1.5, normalized=normalized)
    expected, factors = route_reference(
        partials.sum(0)[:, :NUM], CHOICES, None, RouteForm(NUM, "softmax", normalized, 1.5)
    )
    assert chosen.tolist() == expected
    torch.testing.assert_close(weights, torch.tensor(factors), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_tokens", [1, 9, 700])
def test_choices_are_sorted_by_expert(num_tokens: int) -> None:
    chosen = torch.stack([torch.randperm(NUM, generator=torch.Generator().manual_seed(i)) for i in range(num_tokens)])
    chosen = chosen[:, :CHOICES].to(torch.int32).contiguous()
    places, counts = torch.full((NUM, 700), -1, dtype=torch.int32), torch.full((NUM,), -1, dtype=torch.int32)
    sort(places, counts, chosen)
    for expert in range(NUM):
        expected = (chosen.flatten() == expert).nonzero().flatten().tolist()
        assert places[expert, : counts[expert]].tolist() == expected
        assert (places[expert, len(expected) :] == -1).all()


@pytest.mark.parametrize("format", FORMATS)
def test_tokens_are_computed_by_their_experts(format: str) -> None:
    hidden, inner, dtype, num_tokens = columns_of(format, 64), columns_of(format, 96), torch.float32, 21
    gate, up = (device_matrix(NUM * inner, hidden, format, dtype, seed=seed) for seed in (1, 2))
    last = device_matrix(NUM * hidden, inner, format, dtype, seed=3)
    x, logits = random(num_tokens, hidden, seed=4), random(1, num_tokens, NUM + 1, seed=5)
    shared = random(2, num_tokens, hidden, seed=6)
    chosen = torch.zeros(num_tokens, CHOICES, dtype=torch.int32)
    weights, out = torch.zeros(num_tokens, CHOICES), poisoned(num_tokens, hidden, dtype=dtype)
    places, counts = torch.zeros(NUM, 32, dtype=torch.int32), torch.zeros(NUM, dtype=torch.int32)
    middle = poisoned(num_tokens * CHOICES, inner, dtype=dtype)
    parts = poisoned(num_tokens * CHOICES, hidden, dtype=torch.float32)
    route(chosen, weights, logits, NUM, 1.0, normalized=True)
    sort(places, counts, chosen)
    gate_up(middle, x, places, counts, gate, up, CHOICES)
    down(parts, middle, places, counts, last, num_tokens)
    combine(out, parts, weights, shared, logits)
    both = torch.cat([part.dequantize().view(NUM, inner, hidden) for part in (gate, up)], dim=1)
    matrices = ExpertMatrices(both, last.dequantize().view(NUM, hidden, inner))
    expected = experts_reference(x, chosen.tolist(), weights.tolist(), matrices, ExpertActivation("silu"))
    expected += shared.double().sum(0) * torch.sigmoid(logits[0, :, NUM:].double())
    assert_near(out, expected, TOLERANCE[dtype])
    # The same bits alone.
    alone = poisoned(1, hidden, dtype=dtype)
    route(chosen[:1], weights[:1], logits[:, 20:], NUM, 1.0, normalized=True)
    sort(places, counts, chosen[:1])
    gate_up(middle[:CHOICES], x[20:], places, counts, gate, up, CHOICES)
    down(parts[:CHOICES], middle[:CHOICES], places, counts, last, 1)
    combine(alone, parts[:CHOICES], weights[:1], shared[:, 20:].contiguous(), logits[:, 20:])
    assert torch.equal(alone[0], out[20])
