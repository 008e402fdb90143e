"""Histograms: buckets, sums and quantiles."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.metrics.histogram import REQUEST_S, TOKENS, Histogram, quantile, summed
from pipeline.metrics.stats import HistogramCounts

BOUNDS = (1.0, 2.0, 5.0)


def test_a_value_counts_in_the_first_bucket_that_bounds_it() -> None:
    histogram = Histogram(BOUNDS)
    for value in (0.0, 1.0, 1.5, 2.0, 5.0, 5.1, 100.0):
        histogram.observe(value)
    assert histogram.counts() == HistogramCounts([2, 2, 1, 2], 0.0 + 1 + 1.5 + 2 + 5 + 5.1 + 100)


def test_a_repeated_value_counts_repeatedly() -> None:
    histogram = Histogram(BOUNDS)
    histogram.observe(3.0, 4)
    histogram.observe(3.0, 0)
    assert histogram.counts() == HistogramCounts([0, 0, 4, 0], 12.0)


@given(st.lists(st.lists(st.floats(0, 10), max_size=20), max_size=5))
def test_the_sum_of_parts_is_the_histogram_of_all(parts: list[list[float]]) -> None:
    whole, each = Histogram(BOUNDS), []
    for part in parts:
        one = Histogram(BOUNDS)
        for value in part:
            one.observe(value)
            whole.observe(value)
        each.append(one.counts())
    total = summed(each, BOUNDS)
    assert total.counts == whole.counts().counts
    assert total.total == pytest.approx(whole.counts().total)


@pytest.mark.parametrize(
    ("counts", "q", "expected"),
    [
        ([0, 0, 0, 0], 0.5, None),
        ([4, 0, 0, 0], 0.5, 0.5),
        ([0, 4, 0, 0], 0.25, 1.25),
        ([2, 0, 2, 0], 0.5, 1.0),
        ([2, 0, 2, 0], 0.75, 3.5),
        ([0, 0, 0, 3], 0.5, 5.0),
    ],
)
def test_a_quantile_equals_prometheus_s(counts: list[int], q: float, expected: float | None) -> None:
    assert quantile(HistogramCounts(counts, 0.0), BOUNDS, q) == expected


def test_bounds_increase() -> None:
    for bounds in (REQUEST_S, TOKENS):
        assert list(bounds) == sorted(set(bounds))
    assert TOKENS[:6] == (1, 2, 5, 10, 20, 50)
