"""Figures of a simulation, and tables of them that fit 80 columns."""

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from tools.simulator.requests import Trace
from tools.simulator.simulation import Outcome

REFUSED_S = float("inf")


class Summary(msgspec.Struct, frozen=True):
    """Times in seconds. A refused request counts as an infinite time to first token."""

    policy: str
    num_replicas: int
    num_requests: int
    num_refused: int
    hit_rate: float
    """Prompt tokens that were found in a prefix cache, of all prompt tokens."""
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    """Time per output token after the first."""
    tpot_p99_s: float
    output_tokens_per_s: float
    busy: float
    """Mean share of time in which a replica computes."""
    busiest: float
    num_preemptions: int
    predicted_ttft_s: float
    """Mean."""
    mean_ttft_s: float
    """Without refused requests."""
    took_s: float
    """CPU time of the simulation."""
    route_us: float
    """CPU time to route a request, mean."""


def summarize(trace: Trace, outcome: Outcome) -> Summary:
    """The figures of a run."""
    requests = trace.requests
    arrivals = np.array([one.arrival_s for one in requests])
    was_taken = outcome.replica_index >= 0
    ttfts = np.where(was_taken, outcome.first_s - arrivals, REFUSED_S)
    p50, p95, p99 = (float(np.percentile(ttfts, each, method="higher")) for each in (50, 95, 99))
    longest = np.array([max(one.outputs) for one in requests])
    has_more = was_taken & (longest > 1)
    tpots = (outcome.end_s - outcome.first_s)[has_more] / (longest[has_more] - 1)
    num_prompt = np.array([one.num_prompt for one in requests])[was_taken].sum()
    num_output = sum(one.num_output for one, taken in zip(requests, was_taken, strict=True) if taken)
    span_s = max(float(np.nanmax(outcome.end_s, initial=0.0)) - requests[0].arrival_s, 1e-9)
    busy = outcome.busy_s / span_s
    return Summary(
        outcome.setup.policy,
        outcome.setup.num_replicas,
        len(requests),
        int((~was_taken).sum()),
        float(outcome.num_cached[was_taken].sum() / num_prompt) if num_prompt else 0.0,
        p50,
        p95,
        p99,
        float(np.percentile(tpots, 50)) if len(tpots) else 0.0,
        float(np.percentile(tpots, 99)) if len(tpots) else 0.0,
        num_output / span_s,
        float(busy.mean()),
        float(busy.max()),
        outcome.num_preemptions,
        outcome.predicted_s,
        float(ttfts[was_taken].mean()) if was_taken.any() else 0.0,
        outcome.took_s,
        1e6 * outcome.route_s / len(requests),
    )


HEAD = ("policy", "replicas", "hits", "TTFT p50", "p99", "TPOT p99", "tok/s", "busy", "refused")
WIDTHS = (15, 8, 5, 8, 7, 8, 8, 4, 7)


def table(summaries: Iterable[Summary]) -> str:
    """A line for each, at most 80 columns wide."""
    return "\n".join([_line(HEAD), *(_line(_cells(one)) for one in summaries)])


def _cells(one: Summary) -> Sequence[str]:
    return (
        one.policy,
        f"{one.num_replicas:,}",
        f"{100 * one.hit_rate:.1f}",
        seconds(one.ttft_p50_s),
        seconds(one.ttft_p99_s),
        seconds(one.tpot_p99_s),
        f"{one.output_tokens_per_s:,.0f}",
        f"{100 * one.busy:.0f}",
        f"{one.num_refused:,}",
    )


def _line(cells: Sequence[str]) -> str:
    first, *others = zip(cells, WIDTHS, strict=True)
    return " ".join([f"{first[0]:<{first[1]}}", *(f"{cell:>{width}}" for cell, width in others)]).rstrip()


def seconds(value: float) -> str:
    """A time in three digits and a unit."""
    if value == REFUSED_S:
        return "–"
    if value < 1:
        return f"{1000 * value:.3g}ms" if value < 0.1 else f"{1000 * value:.0f}ms"
    return f"{value:.3g}s" if value < 1000 else f"{value:.0f}s"


def describe(trace: Trace) -> str:
    """A trace in one line."""
    requests = trace.requests
    num = len(requests)
    prompt = sum(one.num_prompt for one in requests) / num
    output = sum(one.num_output for one in requests) / num
    seen: set[int] = set()
    num_common = 0
    for one in requests:
        num_common += trace.block_tokens * next(
            (index for index, key in enumerate(one.keys) if key not in seen), len(one.keys)
        )
        seen.update(one.keys, one.output_keys)
    rate = f"{num / trace.span_s:.3g}/s" if trace.span_s else "at once"
    common = num_common / (prompt * num)
    return (
        f"{trace.name}: {num:,} requests in {trace.span_s:,.0f} s ({rate}), {prompt:,.0f} tokens in,\n"
        f"{output:,.0f} out; {100 * common:.1f} % of the prompt tokens were there before"
    )
