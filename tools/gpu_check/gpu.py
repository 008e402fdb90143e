"""Timers, graphs and pinned memory for the GPU, with substitutes for interpreted kernels.

Sections use only these functions, so --interpret runs all their code without a GPU. Times are then host times.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from pipeline.kernels.triton.launch import INTERPRETED

Run = Callable[[], object]

WARMUPS = 3
MOST_REPEATS = 200
LEAST_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Times:
    """Statistics over repeats."""

    median_ms: float
    least_ms: float
    most_ms: float
    num: int


class TimedEvent:
    """A CUDA event with a timestamp."""

    def __init__(self, *, blocking: bool = False) -> None:
        self._real: Any = None if INTERPRETED else torch.cuda.Event(enable_timing=True, blocking=blocking)  # type: ignore[no-untyped-call]
        self._at_s = 0.0

    def record(self) -> None:
        if self._real is None:
            self._at_s = time.perf_counter()
        else:
            self._real.record()

    def wait(self) -> None:
        """Block until the GPU has reached this event."""
        if self._real is not None:
            self._real.synchronize()

    def ms_until(self, later: "TimedEvent") -> float:
        """Milliseconds between two events. Both must have completed."""
        if self._real is None:
            return (later._at_s - self._at_s) * 1e3
        return float(self._real.elapsed_time(later._real))


def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")


def synchronize() -> None:
    """Wait for all launched work. Raises the error of any launch that failed."""
    if not INTERPRETED:
        torch.cuda.synchronize()


def graph(run: Run) -> Run:
    """Capture `run` in a CUDA graph, after one call that compiles its kernels. The addresses it uses must not
    change."""
    run()
    synchronize()
    if INTERPRETED:
        return run
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        run()
    return recorded.replay


def pinned(num: int, dtype: torch.dtype) -> Tensor:
    """Zeros in pinned host memory, [num]."""
    return torch.zeros(num, dtype=dtype, pin_memory=not INTERPRETED)


def no_syncs() -> AbstractContextManager[None]:
    """Make torch raise RuntimeError if it synchronizes with the GPU."""
    return nullcontext() if INTERPRETED else _strict()


@contextmanager
def _strict() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def memory_bytes() -> int:
    """Used GPU memory, over all processes."""
    if INTERPRETED:
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def free_memory() -> None:
    """Free the unused memory that torch caches."""
    if not INTERPRETED:
        torch.cuda.empty_cache()


def time_runs(runs: Sequence[Run], total_ms: float = 300.0) -> Times:
    """Time calls one by one with events, cycling through `runs`, which do the same work on different memory. Repeats as
    often as `total_ms` allows, within limits. For work that takes longer than its launch."""
    for i in range(WARMUPS):
        runs[i % len(runs)]()
    synchronize()
    first_ms = _timed([runs[0]])[0]
    num = 2 if INTERPRETED else max(LEAST_REPEATS, min(MOST_REPEATS, int(total_ms / max(first_ms, 1e-3))))
    return _times(_timed([runs[i % len(runs)] for i in range(num)]))


def time_graphed(runs: Sequence[Run], total_ms: float = 200.0) -> Times:
    """Time one call of `runs`, all captured in one graph: the duration of a short kernel without launch overhead,
    including the gap to the next kernel."""
    replay = graph(lambda: [run() for run in runs])
    found = time_runs([replay], total_ms)
    num = len(runs)
    return Times(found.median_ms / num, found.least_ms / num, found.most_ms / num, found.num)


def _timed(runs: Sequence[Run]) -> list[float]:
    events = [(TimedEvent(), TimedEvent()) for _ in runs]
    for run, (begin, end) in zip(runs, events, strict=True):
        begin.record()
        run()
        end.record()
    synchronize()
    return [begin.ms_until(end) for begin, end in events]


def _times(all_ms: Sequence[float]) -> Times:
    return Times(median(all_ms), min(all_ms), max(all_ms), len(all_ms))


def relative_error(out: Tensor, reference: Tensor) -> float:
    """‖out - reference‖ / ‖reference‖ over all elements, in float64. Infinite if `out` has unexpected NaNs."""
    found, right = out.double().cpu(), reference.double().cpu()
    assert found.shape == right.shape, f"{list(found.shape)}, not {list(right.shape)}"
    difference = torch.linalg.vector_norm(found - right).item()
    error = difference / max(torch.linalg.vector_norm(right).item(), 1e-30)
    return error if error == error else float("inf")


def poison(tensor: Tensor) -> None:
    """Fill memory with a value that is never a result, so that elements that were not written show."""
    if tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).min + 7)


def random(generator_seed: int, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """Normally distributed numbers on the device."""
    generator = torch.Generator(device()).manual_seed(generator_seed)
    wide = torch.float32 if INTERPRETED else dtype
    return (torch.randn(shape, generator=generator, device=device(), dtype=wide) * scale).to(dtype)
