"""Histograms that cost one bisection per value, and the bounds of each metric.

Bounds are vLLM's if it has the metric, so that quantiles in its dashboards are comparable.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from pipeline.metrics.stats import HistogramCounts

Bounds = tuple[float, ...]

TIME_TO_FIRST_TOKEN_S: Bounds = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_S: Bounds = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0,
)  # fmt: skip
"""vLLM's bounds begin at 10 ms; tokens of small models are faster."""
REQUEST_S: Bounds = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
STEP_TOKENS: Bounds = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
PLAN_WAIT_S: Bounds = (
    0.000001, 0.000002, 0.000005, 0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02,
    0.05, 0.1, 1.0,
)  # fmt: skip
TOKENS: Bounds = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
N: Bounds = (1.0, 2.0, 5.0, 10.0, 20.0)


class Histogram:
    """Counts each value in the bucket of the smallest bound that it does not exceed."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def counts(self) -> HistogramCounts:
        return HistogramCounts(list(self._counts), self._total)


def summed(parts: Iterable[HistogramCounts], bounds: Bounds) -> HistogramCounts:
    """The sum of histograms with equal bounds."""
    counts, total = [0] * (len(bounds) + 1), 0.0
    for part in parts:
        counts = [ours + theirs for ours, theirs in zip(counts, part.counts, strict=True)]
        total += part.total
    return HistogramCounts(counts, total)


def quantile(histogram: HistogramCounts, bounds: Sequence[float], q: float) -> float | None:
    """The q-quantile, like Prometheus's histogram_quantile: linear within a bucket, and the last bound for values above
    it. None without values."""
    num_values = sum(histogram.counts)
    if num_values == 0:
        return None
    rank, below = q * num_values, 0
    for index, count in enumerate(histogram.counts[:-1]):
        if below + count >= rank and count:
            low = bounds[index - 1] if index else 0.0
            return low + (bounds[index] - low) * (rank - below) / count
        below += count
    return bounds[-1]
