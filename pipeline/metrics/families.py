"""Builds metric families from the counts of a server's stages."""

from collections.abc import Callable
from itertools import accumulate
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from pipeline.metrics.histogram import Bounds
from pipeline.metrics.stats import HistogramCounts, ServerStats, StageStats

C = TypeVar("C")
Labels = dict[str, str]


def counts_of(stats: ServerStats, kind: type[C]) -> list[C]:
    """The counts of this kind, of all stages that have reported any."""
    return [counts for _, counts in counts_by_stage(stats, kind)]


def counts_by_stage(stats: ServerStats, kind: type[C]) -> list[tuple[str, C]]:
    """Names of stages and their counts of this kind."""
    return [
        (stage.name, stage.counts.own)
        for stage in stats.stages
        if stage.counts is not None and isinstance(stage.counts.own, kind)
    ]


def gauge(name: str, words: str, labels: Labels, value: float) -> Metric:
    family = GaugeMetricFamily(name, words, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def counter(name: str, words: str, labels: Labels, value: float) -> Metric:
    family = CounterMetricFamily(name, words, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def histogram(name: str, words: str, labels: Labels, counts: HistogramCounts, bounds: Bounds) -> Metric:
    family = HistogramMetricFamily(name, words, labels=list(labels))
    family.add_metric(list(labels.values()), cumulative_buckets(counts, bounds), counts.total)
    return family


def cumulative_buckets(histogram: HistogramCounts, bounds: Bounds) -> list[tuple[str, float]]:
    """Upper bounds and cumulative counts."""
    above = zip((*map(str, bounds), "+Inf"), accumulate(histogram.counts), strict=True)
    return [(bound, float(count)) for bound, count in above]


def counter_by_stage(name: str, words: str, stages: list[tuple[str, C]], of: Callable[[C], float]) -> Metric:
    family = CounterMetricFamily(name, words, labels=["stage"])
    for stage, counts in stages:
        family.add_metric([stage], of(counts))
    return family


def by_name(family: GaugeMetricFamily, stages: list[tuple[str, C]], of: Callable[[C], float]) -> Metric:
    """Add a value for each stage."""
    for stage, counts in stages:
        family.add_metric([stage], of(counts))
    return family


def by_stage(
    family: GaugeMetricFamily | CounterMetricFamily,
    stages: list[StageStats],
    of: Callable[[StageStats], float | None],
) -> Metric:
    """Add a value for each stage for which `of` returns one."""
    for stage in stages:
        if (value := of(stage)) is not None:
            family.add_metric([stage.name], value)
    return family
