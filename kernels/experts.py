"""A mixture of experts: each token is computed by the few feed-forward layers that a router chooses.

    route    scores of a token's experts, the largest of them, and their weights
    experts  each expert computes its tokens in one matmul; the results of a token are summed in the order of its
             choices, so that they do not depend on the other tokens of the step

Shapes: T tokens, E experts, C chosen experts of a token, H hidden size, I intermediate size.

Sources: Shazeer et al., 2017, arXiv:1701.06538; for sigmoid scores and the bias that only chooses, DeepSeek-V3
(arXiv:2412.19437, section 2.1.2).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.kernels.activations import ACTIVATIONS, swiglu_oai
from pipeline.kernels.row_by_row import row_by_row


@dataclass(frozen=True, slots=True)
class RouteOptions:
    """How logits become weights; `Experts` in pipeline/runtime/model/special_layers.py describes the fields."""

    num_experts: int
    scoring: str
    normalized: bool
    scale: float = 1.0
    num_groups: int = 1
    groups_per_token: int = 1
    best_of_group: int = 2
    factors: "Tensor | None" = None
    """[num_experts] float32"""
    softcap: float = 0.0


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """The matrices of all experts of a layer."""

    gate_up: Tensor
    """[E, 2I, H], gate first; [E, I, H] if the layer is not gated."""
    down: Tensor
    """[E, H, I]"""
    gate_up_bias: Tensor | None = None
    """[E, 2I] or [E, I]"""
    down_bias: Tensor | None = None
    """[E, H]"""


@dataclass(frozen=True, slots=True)
class ExpertActivation:
    """What is between the two matmuls."""

    kind: str
    gated: bool = True
    alpha: float = 0.0
    limit: float = 0.0
    """`alpha` and `limit` are those of "swiglu_oai"."""

    def apply(self, x: Tensor) -> Tensor:
        """[N, 2I], or [N, I] if not gated, to [N, I]."""
        if not self.gated:
            return row_by_row(ACTIVATIONS[self.kind], x)
        gate, up = x.chunk(2, dim=-1)
        if self.kind == "swiglu_oai":
            return swiglu_oai(gate, up, self.alpha, self.limit)
        return row_by_row(ACTIVATIONS[self.kind], gate) * up


def route(chosen: Tensor, weights: Tensor, logits: Tensor, selection_bias: Tensor | None, form: RouteOptions) -> None:
    """Choose the experts of each token. chosen [T, C] int64, weights [T, C] float32, selection_bias [E]
    float32 or None, logits [T, E or more], of which the first are those of experts. The largest score comes
    first; among equal ones, the first expert."""
    logits = logits[:, : form.num_experts].float()
    if form.softcap:
        logits = form.softcap * row_by_row(torch.tanh, logits / form.softcap)
    scores = row_by_row(torch.sigmoid, logits) if form.scoring == "sigmoid" else torch.softmax(logits, dim=-1)
    ranked = scores if selection_bias is None else scores + selection_bias
    if form.num_groups > 1:
        ranked = _in_best_groups(ranked, form)
    order = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[:, : chosen.shape[1]]
    picked = scores.gather(1, order)
    if form.normalized:
        # Rounds less than dividing: small scores may be denormal.
        picked = (
            torch.softmax(logits.gather(1, order), dim=-1)
            if form.scoring == "softmax"
            else picked / picked.sum(dim=-1, keepdim=True)
        )
    chosen.copy_(order)
    picked = picked * form.scale
    weights.copy_(picked if form.factors is None else picked * form.factors[order])


def _in_best_groups(ranked: Tensor, form: RouteOptions) -> Tensor:
    """The scores [T, E]; -inf for experts outside a token's best groups. Among equal groups, the first is better."""
    groups = ranked.view(len(ranked), form.num_groups, -1)
    sums = groups.topk(form.best_of_group, dim=-1).values.sum(dim=-1)
    best = torch.sort(sums, dim=-1, descending=True, stable=True).indices[:, : form.groups_per_token]
    is_best = torch.zeros_like(sums, dtype=torch.bool).scatter_(1, best, True)
    return groups.masked_fill(~is_best[..., None], -torch.inf).view_as(ranked)


def experts(
    out: Tensor,
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    matrices: ExpertMatrices,
    activation: ExpertActivation,
    linear: Callable[[Tensor, Tensor, Tensor, Tensor | None], None],
) -> None:
    """out = the sum of a token's experts, each times its weight. out and x [T, H], chosen and weights [T, C].

    `linear` is the matmul of the other layers."""
    parts = x.new_empty(*chosen.shape, matrices.down.shape[1])
    for expert in sorted(set(chosen.flatten().tolist())):
        tokens, slots = (chosen == expert).nonzero(as_tuple=True)
        inner = x.new_empty(len(tokens), matrices.gate_up.shape[1])
        bias = None if matrices.gate_up_bias is None else matrices.gate_up_bias[expert]
        linear(inner, x[tokens], matrices.gate_up[expert], bias)
        made = x.new_empty(len(tokens), matrices.down.shape[1])
        bias = None if matrices.down_bias is None else matrices.down_bias[expert]
        linear(made, activation.apply(inner).to(x.dtype), matrices.down[expert], bias)
        parts[tokens, slots] = made
    total = parts[:, 0].float() * weights[:, 0, None]
    for slot in range(1, chosen.shape[1]):
        total += parts[:, slot].float() * weights[:, slot, None]
    out.copy_(total)


def add_gated(out: Tensor, x: Tensor, logits: Tensor | None) -> None:
    """out += x * the sigmoid of the last of a token's logits; out += x without logits. out and x [T, H]."""
    out += x if logits is None else x * row_by_row(torch.sigmoid, logits[:, -1:].float()).to(x.dtype)


def route_reference(
    logits: Tensor, num: int, selection_bias: Tensor | None, form: RouteOptions
) -> tuple[list[list[int]], list[list[float]]]:
    """The chosen experts and their weights, a token at a time in float64."""
    chosen, weights = [], []
    for row in logits.double():
        row = form.softcap * torch.tanh(row / form.softcap) if form.softcap else row
        scores = 1 / (1 + torch.exp(-row)) if form.scoring == "sigmoid" else torch.exp(row) / torch.exp(row).sum()
        ranked = scores if selection_bias is None else scores + selection_bias.double()
        size = len(row) // form.num_groups
        groups = [sorted(map(float, ranked[at : at + size]), reverse=True) for at in range(0, len(row), size)]
        by_score = sorted(range(form.num_groups), key=lambda i: (-sum(groups[i][: form.best_of_group]), i))
        allowed = by_score[: form.groups_per_token]
        order = sorted(range(len(row)), key=lambda i: (i // size not in allowed, -float(ranked[i]), i))[:num]
        picked = [float(scores[i]) for i in order]
        total = sum(picked) if form.normalized else 1.0
        chosen.append(order)
        factors = [1.0] * num if form.factors is None else [float(form.factors[i]) for i in order]
        weights.append([form.scale * value / total * factor for value, factor in zip(picked, factors, strict=True)])
    return chosen, weights


def experts_reference(
    x: Tensor,
    chosen: list[list[int]],
    weights: list[list[float]],
    matrices: ExpertMatrices,
    activation: ExpertActivation,
) -> Tensor:
    """The formula in float64, a token and an expert at a time. Returns [T, H]."""
    out = torch.zeros(len(x), matrices.down.shape[1], dtype=torch.float64)
    for token, (picked, factors) in enumerate(zip(chosen, weights, strict=True)):
        for expert, weight in zip(picked, factors, strict=True):
            inner = matrices.gate_up[expert].double() @ x[token].double()
            if matrices.gate_up_bias is not None:
                inner += matrices.gate_up_bias[expert].double()
            made = matrices.down[expert].double() @ activation.apply(inner)
            if matrices.down_bias is not None:
                made += matrices.down_bias[expert].double()
            out[token] += weight * made
    return out
