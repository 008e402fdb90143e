"""Mixtures of experts: choices, their order, the products of each expert in every format, and their sums."""

from typing import Any

import pytest
import torch

from pipeline.kernels.experts import ExpertActivation, ExpertMatrices, RouteOptions, experts_reference, route_reference
from pipeline.kernels.triton.experts import ExpertLinear, Order, combine, down, gate_up, route, sort
from tests.kernels.triton.gemms import FORMATS, TOLERANCE, assert_near, columns_of, device_matrix, poisoned, random

NUM, CHOICES = 5, 3
GROUPS: dict[str, dict[str, Any]] = {
    "no groups": {},
    "one of two": {"num_groups": 2, "groups_per_token": 1},
    "two of three": {"num_groups": 3, "groups_per_token": 2},
    "two of three by the best": {"num_groups": 3, "groups_per_token": 2, "best_of_group": 1},
}


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("num_tokens", "normalized", "biased"), [(1, False, False), (7, True, False), (7, True, True)])
def test_a_router_chooses_the_largest_scores(num_tokens: int, normalized: bool, biased: bool, scoring: str) -> None:
    partials = random(2, num_tokens, NUM + 1, seed=1) * 2
    partials[:, 0] = 1.0  # all equal
    chosen = torch.full((num_tokens, CHOICES), -1, dtype=torch.int32)
    weights = poisoned(num_tokens, CHOICES, dtype=torch.float32)
    form = RouteOptions(NUM, scoring, normalized, 1.5)
    bias = random(NUM, seed=2) if biased else None
    route(chosen, weights, partials, form, bias)
    expected, factors = route_reference(partials.sum(0)[:, :NUM], CHOICES, bias, form)
    assert chosen.tolist() == expected
    torch.testing.assert_close(weights, torch.tensor(factors), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_router_chooses_in_the_best_groups(scoring: str, biased: bool, name: str) -> None:
    num, num_tokens = 6, 9
    partials = random(2, num_tokens, num + 1, seed=1) * 2
    partials[:, 0] = 1.0  # all equal
    chosen = torch.full((num_tokens, CHOICES), -1, dtype=torch.int32)
    weights = poisoned(num_tokens, CHOICES, dtype=torch.float32)
    form, bias = RouteOptions(num, scoring, True, 1.5, **GROUPS[name]), random(num, seed=2) if biased else None
    route(chosen, weights, partials, form, bias)
    expected, factors = route_reference(partials.sum(0)[:, :num], CHOICES, bias, form)
    assert chosen.tolist() == expected
    torch.testing.assert_close(weights, torch.tensor(factors), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_token_that_is_not_finite_has_different_experts(scoring: str, biased: bool, value: float) -> None:
    """Twice the same one would write beyond the expert's list, into those of others."""
    form, bias = RouteOptions(NUM, scoring, True, 1.0), random(NUM, seed=2) if biased else None
    partials, found = random(2, 6, NUM + 1, seed=1), []
    for is_spoilt in (False, True):
        if is_spoilt:
            partials[:, 1], partials[0, 3, 2:] = value, value
        chosen, weights = torch.full((6, CHOICES), -1, dtype=torch.int32), poisoned(6, CHOICES, dtype=torch.float32)
        route(chosen, weights, partials, form, bias)
        assert all(len(set(row)) == CHOICES and set(row) <= set(range(NUM)) for row in chosen.tolist())
        found.append((chosen, weights))
    for before, after in zip(*found, strict=True):
        assert torch.equal(before[[0, 2, 4, 5]], after[[0, 2, 4, 5]])


@pytest.mark.parametrize("num_tokens", [1, 9, 700])
def test_choices_are_sorted_by_expert(num_tokens: int) -> None:
    chosen = torch.stack([torch.randperm(NUM, generator=torch.Generator().manual_seed(i)) for i in range(num_tokens)])
    chosen = chosen[:, :CHOICES].to(torch.int32).contiguous()
    choice_indices, counts = torch.full((NUM, 700), -1, dtype=torch.int32), torch.full((NUM,), -1, dtype=torch.int32)
    sort(Order(choice_indices, counts), chosen)
    for expert in range(NUM):
        expected = (chosen.flatten() == expert).nonzero().flatten().tolist()
        assert choice_indices[expert, : counts[expert]].tolist() == expected
        assert (choice_indices[expert, len(expected) :] == -1).all()


@pytest.mark.parametrize(
    ("format", "kind", "gated", "biased"),
    [
        *((format, "silu", True, False) for format in FORMATS),
        ("float", "swiglu_oai", True, True),
        ("q8_0", "swiglu_oai", True, True),  # what MXFP4 becomes
        ("float", "relu2", False, True),
    ],
)
def test_tokens_are_computed_by_their_experts(format: str, kind: str, gated: bool, biased: bool) -> None:
    num, num_choices = 3, 2  # the interpreter takes long for each
    hidden, inner, dtype, num_tokens = columns_of(format, 64), columns_of(format, 96), torch.float32, 21
    form, route_form = ExpertActivation(kind, gated, 1.7, 0.8), RouteOptions(num, "softmax", True)

    def linear(num_rows: int, num_columns: int, seed: int) -> ExpertLinear:
        bias = random(num_rows, seed=seed + 10) if biased else None
        return ExpertLinear(device_matrix(num_rows, num_columns, format, dtype, seed=seed), bias)

    gate, last = linear(num * inner, hidden, 1), linear(num * hidden, inner, 3)
    up = linear(num * inner, hidden, 2) if gated else None
    x, logits = random(num_tokens, hidden, seed=4), random(1, num_tokens, num + 1, seed=5)
    shared = random(2, num_tokens, hidden, seed=6)
    chosen = torch.zeros(num_tokens, num_choices, dtype=torch.int32)
    weights, out = torch.zeros(num_tokens, num_choices), poisoned(num_tokens, hidden, dtype=dtype)
    order = Order(torch.zeros(num, 32, dtype=torch.int32), torch.zeros(num, dtype=torch.int32))
    middle = poisoned(num_tokens * num_choices, inner, dtype=dtype)
    parts = poisoned(num_tokens * num_choices, hidden, dtype=torch.float32)
    route(chosen, weights, logits, route_form)
    sort(order, chosen)
    gate_up(middle, x, order, gate, up, num_choices, form)
    down(parts, middle, order, last, num_tokens)
    combine(out, parts, weights, shared, logits)

    first = [one for one in (gate, up) if one is not None]
    matrices = ExpertMatrices(
        torch.cat([one.matrix.dequantize().view(num, inner, hidden) for one in first], dim=1),
        last.matrix.dequantize().view(num, hidden, inner),
        torch.cat([one.bias.view(num, inner) for one in first if one.bias is not None], dim=1) if biased else None,
        None if last.bias is None else last.bias.view(num, hidden),
    )
    expected = experts_reference(x, chosen.tolist(), weights.tolist(), matrices, form)
    expected += shared.double().sum(0) * torch.sigmoid(logits[0, :, num:].double())
    assert_near(out, expected, TOLERANCE[dtype])
    # The same bits alone.
    alone = poisoned(1, hidden, dtype=dtype)
    route(chosen[:1], weights[:1], logits[:, 20:], route_form)
    sort(order, chosen[:1])
    gate_up(middle[:num_choices], x[20:], order, gate, up, num_choices, form)
    down(parts[:num_choices], middle[:num_choices], order, last, 1)
    combine(alone, parts[:num_choices], weights[:1], shared[:, 20:].contiguous(), logits[:, 20:])
    assert torch.equal(alone[0], out[20])
