"""How a model's experts are chosen, for the kernels that need torch."""

from torch import Tensor

from pipeline.kernels.experts import RouteOptions
from pipeline.runtime.model.special_layers import Experts


def route_options(experts: Experts, factors: Tensor | None = None) -> RouteOptions:
    """`factors` are those of a layer's experts, [num] float32."""
    groups = experts.num_groups, experts.groups_per_token, experts.best_of_group
    weights = experts.scoring, experts.normalized, experts.scale
    return RouteOptions(experts.num, *weights, *groups, factors, experts.softcap)
