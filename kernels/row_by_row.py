"""Runs an elementwise function one row at a time.

torch computes most elements of exp, tanh and other functions in vectors, and the rest with the scalar functions of the
C library, whose last bits differ. Which elements are the rest depends on the number of rows and threads. Alone, a row
is always computed in the same way. Sums, products, quotients and square roots are rounded exactly, so they don't need
this; a product whose sum is rounded once (`alpha` of `add_`) is an exception.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def row_by_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` of each row of x [N, ...], which keeps its shape, as one tensor."""
    return torch.cat([function(x[i : i + 1]) for i in range(len(x))]) if len(x) else x
