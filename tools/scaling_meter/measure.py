"""Runs a case at growing sizes, and judges how its CPU time grows."""

import gc
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tools.scaling_meter.case import LOOP_MS, Case

ENDLESS_S = 4.0
"""A single run is interrupted after this time."""
LONG_S = 0.4
"""No larger inputs are tried after a run that takes this long."""
SHORT_S = 0.001
"""Below it, noise and constant costs hide how the time grows."""
MAX_GROWTH = 1.6
"""The largest exponent of n that counts as linear: large tables miss the caches, and sorting takes n log n."""
RUNS = 3
TRIES = 3
"""A case fails only if this many measurements of it do: other processes disturb some."""


@dataclass(frozen=True)
class Sample:
    n: int
    cpu_s: float


@dataclass(frozen=True)
class Result:
    case: Case
    samples: list[Sample]
    problem: str = ""

    @property
    def growth(self) -> float | None:
        """The exponent of n in the CPU time, from the largest input and one of a quarter of its size; None if even the
        largest takes too little time."""
        last = self.samples[-1]
        small = [one for one in self.samples if one.n * 4 <= last.n]
        if last.cpu_s < 2 * SHORT_S or not small:
            return None
        before = small[-1]
        # A time that is too short to compare can only make the growth look smaller than it is.
        return math.log(last.cpu_s / max(before.cpu_s, SHORT_S / 8)) / math.log(last.n / before.n)


class Endless(Exception):
    """A run takes too long."""


def measure(case: Case, max_n: int | None = None) -> Result:
    """Measure a case, again if it fails."""
    most = case.max_n if max_n is None else min(case.max_n, max_n)
    result = _measure(case, most)
    for _ in range(TRIES - 1):
        if not result.problem:
            break
        result = _measure(case, most)
    return result


def _measure(case: Case, max_n: int) -> Result:
    samples: list[Sample] = []
    n = min(case.first_n, max_n)
    while True:
        try:
            with _deadline():
                work = case.make(n)
            cpu_s = _cpu_s(work)
        except Endless:
            return Result(case, [*samples, Sample(n, ENDLESS_S)], f"more than {ENDLESS_S:g} s at n = {n}")
        except Exception as error:  # noqa: BLE001 - any error is the result
            return Result(case, [*samples, Sample(n, 0.0)], f"{type(error).__name__} at n = {n}: {error}"[:400])
        samples.append(Sample(n, cpu_s))
        if n == max_n or cpu_s > LONG_S:
            break
        n = min(n * (4 if cpu_s < SHORT_S / 4 else 2), max_n)
    result = Result(case, samples)
    last = samples[-1]
    if any(one.n <= case.loop_n and one.cpu_s * 1000 > LOOP_MS for one in samples):
        return Result(case, samples, f"more than {LOOP_MS:g} ms at n <= {case.loop_n}, in a loop that others share")
    if (growth := result.growth) is not None and growth > MAX_GROWTH:
        return Result(case, samples, f"grows as n^{growth:.1f}")
    if last.cpu_s * 1000 > case.bound_ms:
        return Result(case, samples, f"{last.cpu_s * 1000:.0f} ms at n = {last.n}, the bound is {case.bound_ms:g} ms")
    return result


def _cpu_s(work: Callable[[], object]) -> float:
    """The least CPU time of a few runs."""
    best = math.inf
    gc.collect(0)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(RUNS):
            with _deadline():
                begin_s = time.process_time()
                work()
                best = min(best, time.process_time() - begin_s)
            if best > LONG_S / 4:
                break
    finally:
        if was_enabled:
            gc.enable()
    return best


@contextmanager
def _deadline() -> Iterator[None]:
    """Raise Endless in what runs too long, also within a regular expression."""
    begin_s = time.process_time()

    def expired(*_: object) -> None:
        # A timer of CPU time would make the kernel count CPU time in ticks.
        if time.process_time() - begin_s >= ENDLESS_S:
            raise Endless
        signal.setitimer(signal.ITIMER_REAL, ENDLESS_S)

    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, ENDLESS_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
