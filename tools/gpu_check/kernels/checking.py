"""How a kernel is checked: what it leaves against a formula in float64, on random inputs, and twice the same."""

from collections.abc import Callable

import torch
from torch import Tensor

from tools.gpu_check import gpu
from tools.gpu_check.readings import Reading, check

EXACT = 1e-4
"""Relative error where operands are exact in float32, and only sums are rounded."""
ROUNDED = 1e-2
"""Where results, or operands on their way, are rounded to bfloat16."""
REPEATS = 2


def checked(case: str, run: Callable[[], object], out: Tensor, right: Tensor, bound: float, note: str = "") -> Reading:
    """Run with `out` poisoned, and compare all of it with `right`, of any dtype and the same shape."""
    gpu.poison(out)
    run()
    gpu.synchronize()
    reading = check(case, gpu.relative_error(out, right), bound, note)
    before = out.clone()
    for _ in range(REPEATS):
        gpu.poison(out)
        run()
        gpu.synchronize()
        if not torch.equal(bits(out), bits(before)):
            return Reading(case, reading.value, bound=bound, result="FAIL", note="not the same in each run: a race")
    return reading


def exactly(case: str, is_right: bool, note: str = "") -> Reading:
    """What has no tolerance."""
    return Reading(case, result="pass" if is_right else "FAIL", note=note)


def bits(tensor: Tensor) -> Tensor:
    """Numbers as integers, so that NaN equals itself."""
    kinds = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
    return tensor.contiguous().view(kinds[tensor.element_size()])
