"""How a model's experts are chosen, for the kernels that need torch."""

from pipeline.kernels.experts import RouteOptions
from pipeline.runtime.model.special_layers import Experts


def route_options(experts: Experts) -> RouteOptions:
    groups = experts.num_groups, experts.groups_per_token, experts.best_of_group
    return RouteOptions(experts.num, experts.scoring, experts.normalized, experts.scale, *groups)
