"""Checks every kernel family of kernels/triton against float64 references, at the shapes of real models."""

from tools.gpu_check.child import Context, Item
from tools.gpu_check.kernels import attention, dense, ends, sampling


def items(context: Context) -> list[Item]:
    """The items, the longest first: processes take items in turn, so the long ones start at once."""
    products = dense.items(context)
    codes = [item for item in products if item.name.startswith("products of int")]
    return [
        *codes,
        *attention.items(context),
        *(item for item in products if item not in codes),
        *sampling.items(context),
        *ends.items(context),
    ]
