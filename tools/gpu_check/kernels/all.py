"""Every family of kernels/triton, at the shapes of models, against formulas in float64."""

from tools.gpu_check.child import Context, Item
from tools.gpu_check.kernels import attention, dense, ends, sampling


def items(context: Context) -> list[Item]:
    """The longest items first: processes take items in turns, so the first ones start at once."""
    products = dense.items(context)
    codes = [item for item in products if item.name.startswith("products of int")]
    return [
        *codes,
        *attention.items(context),
        *(item for item in products if item not in codes),
        *sampling.items(context),
        *ends.items(context),
    ]
