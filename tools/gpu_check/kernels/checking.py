"""Compares kernels with float64 references on random inputs, and with themselves over repeated runs."""

from collections.abc import Callable

import torch
from torch import Tensor

from tools.gpu_check import gpu
from tools.gpu_check.readings import Reading, check

EXACT = 1e-4
"""Relative error if operands are exact in float32 and only sums are rounded."""
ROUNDED = 1e-2
"""Relative error if results or intermediate operands are rounded to bfloat16."""
REPEATS = 2
MANY_REPEATS = 200
"""Where programs share work, so that a race may be rare."""


def check_output(
    case: str,
    run: Callable[[], object],
    out: Tensor,
    right: Tensor,
    bound: float,
    note: str = "",
    *,
    repeats: int = REPEATS,
) -> Reading:
    """Run with `out` poisoned, and compare it with `right`, of any dtype and the same shape. Then `repeats` more times,
    which must return the same bits."""
    gpu.poison(out)
    run()
    gpu.synchronize()
    reading = check(case, gpu.relative_error(out, right), bound, note)
    before = out.clone()
    for _ in range(repeats):
        gpu.poison(out)
        run()
        gpu.synchronize()
        if not torch.equal(bits(out), bits(before)):
            return Reading(case, reading.value, bound=bound, result="FAIL", note="runs differ: a race")
    return reading


def check_exact(case: str, is_right: bool, note: str = "") -> Reading:
    """A check without a tolerance."""
    return Reading(case, result="pass" if is_right else "FAIL", note=note)


def bits(tensor: Tensor) -> Tensor:
    """The numbers as integers, so that NaN equals NaN."""
    kinds = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
    return tensor.contiguous().view(kinds[tensor.element_size()])
