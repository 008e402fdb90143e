"""Every family of kernels/triton, at the shapes of models, against formulas in float64."""

from tools.gpu_check import kernels_attention, kernels_dense, kernels_ends, kernels_sampling
from tools.gpu_check.child import Context, Item


def items(context: Context) -> list[Item]:
    """The longest first."""
    return [
        *kernels_attention.items(context),
        *kernels_dense.items(context),
        *kernels_sampling.items(context),
        *kernels_ends.items(context),
    ]
