"""Metrics of the slots for recurrent states, of models that have some."""

from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from pipeline.metrics.families import counter_by_stage, counts_by_stage
from pipeline.metrics.stats import ScheduleCounts, ServerStats, StateSlotCounts

_COUNTERS: tuple[tuple[str, str, Callable[[StateSlotCounts], int]], ...] = (
    ("snapshots", "Snapshots of recurrent states.", lambda c: c.num_snapshots),
    ("hits", "Sequences that started behind a snapshot.", lambda c: c.num_hits),
    ("evictions", "Snapshots that were evicted.", lambda c: c.num_evictions),
    ("restored", "States copied back from swap space.", lambda c: c.num_restored),
    ("swapped_out", "States of preempted sequences copied to swap space.", lambda c: c.num_swapped_out),
    ("offloaded", "Snapshots copied to swap space.", lambda c: c.num_offloaded),
    (
        "lost_tokens",
        "Tokens computed again because their KV was cached, but not the state behind them.",
        lambda c: c.num_lost_tokens,
    ),
)


def state_metrics(stats: ServerStats) -> Iterator[Metric]:
    """Nothing for models without recurrent layers."""
    stages = [(name, c.states) for name, c in counts_by_stage(stats, ScheduleCounts) if c.states is not None]
    if not stages:
        return
    slots = GaugeMetricFamily("pipeline_state_slots", "Slots for recurrent states.", labels=["stage", "state"])
    swap = GaugeMetricFamily("pipeline_state_swap_slots", "Such slots of swap space.", labels=["stage", "state"])
    for name, counts in stages:
        for state, value in (("free", counts.num_free), ("cached", counts.num_cached), ("held", counts.num_held)):
            slots.add_metric([name, state], value)
        swap.add_metric([name, "free"], counts.num_swap_free)
        swap.add_metric([name, "held"], counts.num_swap_total - counts.num_swap_free)
    yield slots
    yield swap
    for name, words, of in _COUNTERS:
        yield counter_by_stage(f"pipeline_state_{name}", words, stages, of)
