"""Every family of kernels/triton, at the shapes of models, against formulas in float64."""

from tools.gpu_check import kernels_attention, kernels_dense, kernels_ends, kernels_sampling
from tools.gpu_check.child import Context, Item


def items(context: Context) -> list[Item]:
    """The longest first, and what nobody has ever run: processes take items by turns, so the first of them begin at
    once."""
    dense = kernels_dense.items(context)
    codes = [item for item in dense if item.name.startswith("products of int")]
    return [
        *codes,
        *kernels_attention.items(context),
        *(item for item in dense if item not in codes),
        *kernels_sampling.items(context),
        *kernels_ends.items(context),
    ]
