"""Settings for all launches: where kernels run, and workarounds for Triton's interpreter."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton import knobs

INTERPRETED = bool(knobs.runtime.interpret)
"""Whether kernels run on the CPU, program by program, in Triton's interpreter."""

UPCAST_DOT = INTERPRETED
"""Operands of `tl.dot` must be float32: the interpreter multiplies the bits of bfloat16 as integers."""

NUM_PROGRAMS_INTERPRETED = 6
"""Replaces the number of multiprocessors in the interpreter. Few, because it runs programs one by one; more than one,
so that work is divided."""


NUM_MULTIPROCESSORS_COMPILED = 132
"""The number of an H100, for compiling kernels without a GPU, with tensors on the CPU."""


def num_multiprocessors(device: torch.device) -> int:
    """The GPU's multiprocessors; a small number if kernels are interpreted, an H100's if they are only compiled."""
    if INTERPRETED:
        return NUM_PROGRAMS_INTERPRETED
    if device.type != "cuda":
        return NUM_MULTIPROCESSORS_COMPILED
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least `number`, which is 1 or more."""
    return 1 << (number - 1).bit_length()


def _let_tensors_bound_loops() -> None:
    """Patch the interpreter: a loaded scalar is an array of one element there, which numpy 2.4 no longer converts to an
    integer, so it could not be a loop's bound."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


if INTERPRETED:
    _let_tensors_bound_loops()


class _CompileAhead(triton.AsyncCompileMode):  # type: ignore[misc]
    """Keeps a kernel that is being compiled in Triton's cache, so that other launches of it cost no more than usual."""

    def submit(self, key: Any, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> Any:
        kernel = super().submit(key, compile_fn, finalize_fn)
        finalize_fn(kernel)
        return kernel


@contextmanager
def compiling(num_threads: int) -> Iterator[None]:
    """Launches in this context run nothing. Their kernels are compiled in threads, and are ready when it ends."""
    run = triton.JITFunction.run

    def compile_only(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        return run(kernel, *args, **kwargs | {"warmup": True})

    triton.JITFunction.run = compile_only
    try:
        with ThreadPoolExecutor(num_threads, "compile") as threads, _CompileAhead(threads):
            yield
    finally:
        triton.JITFunction.run = run
