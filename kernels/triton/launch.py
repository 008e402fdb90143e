"""What the launches of all kernels have in common: where they run, and what they have to avoid there."""

from typing import Any

import torch
from triton import knobs

INTERPRETED = bool(knobs.runtime.interpret)
"""Kernels run on the CPU, program by program, in Triton's interpreter."""

UPCAST_DOT = INTERPRETED
"""Operands of `tl.dot` have to be float32: the interpreter multiplies the bits of bfloat16 as if they were integers."""

NUM_PROGRAMS_INTERPRETED = 6
"""Stands for the multiprocessors of a GPU: few, for the interpreter runs one after the other, and several, so that work
is divided."""


NUM_MULTIPROCESSORS_COMPILED = 132
"""An H100's, where kernels are only compiled: for a GPU that isn't there, with tensors of the CPU."""


def num_multiprocessors(device: torch.device) -> int:
    """Of a GPU; a small number where kernels are interpreted, an H100's where they are only compiled."""
    if INTERPRETED:
        return NUM_PROGRAMS_INTERPRETED
    if device.type != "cuda":
        return NUM_MULTIPROCESSORS_COMPILED
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below `number`, which is 1 or more."""
    return 1 << (number - 1).bit_length()


def _let_tensors_bound_loops() -> None:
    """In the interpreter a number that was loaded is an array of one element, which numpy 2.4 no longer takes for an
    integer, so it could not be the bound of a loop."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


if INTERPRETED:
    _let_tensors_bound_loops()
