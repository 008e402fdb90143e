"""The chart of a simulation: times to first token, hits and busy time over the number of replicas, or of policies."""

from collections.abc import Sequence
from math import isfinite

from pipeline.cli.bench.plot.chart import Chart, Row
from pipeline.cli.bench.plot.panels import Bar, BarPanel, Line, LinePanel
from tools.simulator.summary import Summary

WORDS = {"ttft_p50_s": "median", "ttft_p99_s": "99th percentile", "hit_rate": "hits", "busy": "busy"}
"""In tooltips."""


def chart_of(summaries: Sequence[Summary], title: str, subtitle: str) -> Chart:
    """Lines if any policy has several numbers of replicas, else bars. `summaries` must not be empty."""
    policies = list(dict.fromkeys(one.policy for one in summaries))
    is_curve = len({one.num_replicas for one in summaries}) > 1
    rows = (_curves if is_curve else _bars)(summaries, policies)
    return Chart(title, subtitle, tuple(policies), rows, "solid: median, dashed: 99th percentile" if is_curve else "")


def _curves(summaries: Sequence[Summary], policies: list[str]) -> tuple[Row, ...]:
    def lines(field: str, factor: float, *, is_dashed: bool = False) -> list[Line]:
        found = []
        for index, policy in enumerate(policies):
            points = {
                one.num_replicas: factor * getattr(one, field)
                for one in summaries
                if one.policy == policy and isfinite(getattr(one, field)) and getattr(one, field) > 0
            }
            if points:
                found.append(Line(index, f"{policy}, {WORDS[field]}", tuple(sorted(points.items())), is_dashed))
        return found

    panels = [
        LinePanel(
            "Time to first token (TTFT)",
            "replicas",
            "ms",
            tuple(lines("ttft_p50_s", 1000) + lines("ttft_p99_s", 1000, is_dashed=True)),
            is_log=True,
        ),
        LinePanel("Prompt tokens from the prefix cache", "replicas", "%", tuple(lines("hit_rate", 100))),
        LinePanel("Time that a replica computes", "replicas", "%", tuple(lines("busy", 100))),
    ]
    return (Row(tuple(panel for panel in panels if panel.lines)),)


def _bars(summaries: Sequence[Summary], policies: list[str]) -> tuple[Row, ...]:
    def panel(title: str, unit: str, field: str, factor: float) -> BarPanel:
        values = [(one, factor * getattr(one, field)) for one in summaries]
        bars = [Bar(policies.index(one.policy), one.policy, value) for one, value in values if isfinite(value)]
        return BarPanel(title, unit, tuple(bars))

    panels = (
        panel("TTFT, 99th percentile", "ms", "ttft_p99_s", 1000),
        panel("TTFT, median", "ms", "ttft_p50_s", 1000),
        panel("Prompt tokens from the prefix cache", "%", "hit_rate", 100),
    )
    return (Row(tuple(one for one in panels if one.bars)),)
