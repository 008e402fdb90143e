"""The torch ops of mixtures of experts follow their formulas, a token at a time."""

import pytest
import torch
from torch import Tensor

from pipeline.kernels.experts import (
    ExpertActivation,
    ExpertMatrices,
    RouteOptions,
    add_gated,
    experts,
    experts_reference,
    route,
    route_reference,
)
from pipeline.kernels.linear import linear

NUM, CHOSEN, HIDDEN, INNER, TOKENS = 9, 3, 24, 16, 17
FORMS = [
    RouteOptions(NUM, "softmax", False),
    RouteOptions(NUM, "softmax", True),
    RouteOptions(NUM, "sigmoid", False, 2.5),
    RouteOptions(NUM, "sigmoid", True, 2.5),
    RouteOptions(NUM, "sigmoid", True, 2.5, num_groups=3, groups_per_token=1),
    RouteOptions(NUM, "softmax", False, num_groups=3, groups_per_token=2),
    RouteOptions(NUM, "softmax", False, num_groups=3, groups_per_token=2, best_of_group=1),
    RouteOptions(NUM, "softmax", True, factors=torch.linspace(0.5, 2, NUM)),
    RouteOptions(NUM, "sigmoid", True, softcap=1.5),
]


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def routed(logits: Tensor, bias: Tensor | None, form: RouteOptions) -> tuple[Tensor, Tensor]:
    chosen, weights = torch.empty(len(logits), CHOSEN, dtype=torch.int64), torch.empty(len(logits), CHOSEN)
    route(chosen, weights, logits, bias, form)
    return chosen, weights


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_router_chooses_the_largest_scores(form: RouteOptions, has_bias: bool) -> None:
    logits, bias = random(1, TOKENS, NUM + 1) * 3, random(2, NUM) if has_bias else None
    logits[0, :NUM] = 1.0  # all equal
    chosen, weights = routed(logits, bias, form)
    expected, factors = route_reference(logits[:, :NUM], CHOSEN, bias, form)
    assert chosen.tolist() == expected
    torch.testing.assert_close(weights.double(), torch.tensor(factors, dtype=torch.float64), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "activation",
    [
        ExpertActivation("silu"),
        ExpertActivation("gelu_tanh"),
        ExpertActivation("swiglu_oai", True, 1.702, 0.7),
        ExpertActivation("relu2", gated=False),
    ],
    ids=lambda activation: activation.kind,
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_experts_add_up(activation: ExpertActivation, has_bias: bool) -> None:
    width = INNER * (2 if activation.gated else 1)
    matrices = ExpertMatrices(
        random(1, NUM, width, HIDDEN),
        random(2, NUM, HIDDEN, INNER),
        random(3, NUM, width) if has_bias else None,
        random(4, NUM, HIDDEN) if has_bias else None,
    )
    x, chosen_logits = random(5, TOKENS, HIDDEN), random(6, TOKENS, NUM)
    chosen, weights = routed(chosen_logits, None, FORMS[1])
    out = torch.empty(TOKENS, HIDDEN)
    experts(out, x, chosen, weights, matrices, activation, linear)
    expected = experts_reference(x, chosen.tolist(), weights.tolist(), matrices, activation)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)


def test_a_shared_expert_is_added_with_its_gate() -> None:
    out, x, logits = random(1, 5, 8), random(2, 5, 8), random(3, 5, 4)
    plain, gated = out.clone(), out.clone()
    add_gated(plain, x, None)
    add_gated(gated, x, logits)
    torch.testing.assert_close(plain, out + x)
    torch.testing.assert_close(gated, out + x * torch.sigmoid(logits[:, 3:]))
