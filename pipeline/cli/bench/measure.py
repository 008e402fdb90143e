"""Statistics of requests. The package's docstring defines them."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from pipeline.cli.bench.client import RequestResult
from pipeline.cli.bench.loop import Level


class Distribution(msgspec.Struct, frozen=True):
    """A distribution. All fields are 0 if there are no values."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> "Distribution":
        if not values:
            return cls()
        ordered = sorted(values)
        p50, p90, p99 = (percentile(ordered, part) for part in (0.5, 0.9, 0.99))
        return cls(len(ordered), sum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


class Summary(msgspec.Struct, frozen=True):
    """Statistics of one level. Rates are per second of the window, times in milliseconds."""

    concurrency: int
    temperature: float
    window_s: float
    num_requests: int
    """Requests that ended in the window without an error."""
    num_errors: int
    """Of the whole level, including warm-up."""
    errors: dict[str, int]
    """How often each error occurred."""
    prompt_tokens: float
    """Mean per request; also the next."""
    completion_tokens: float
    tokens_are_chunks: bool
    """Some request had no usage in its reply, so its chunks were counted."""
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    prefill_tokens_per_s: float
    ttft_ms: Distribution
    itl_ms: Distribution
    tpot_ms: Distribution
    e2e_ms: Distribution
    stream_itl_ms: Distribution = Distribution()
    """Of the streams that ran beside requests that arrived; `itl_ms` is of these requests."""


def summarize(level: Level, temperature: float = 0.0) -> Summary:
    """The statistics of one level, which was measured at this temperature."""
    window_s = level.closed_s - level.opened_s
    good = [record for record in level.records if record.error is None]
    streams = [record for record in level.streams if record.error is None]
    output = prompt = 0.0
    ttft: list[float] = []
    itl: list[float] = []
    tpot: list[float] = []
    prefill: list[float] = []
    for record in good + streams:
        if record.arrivals:
            inside = sum(_within(level, time_s) for time_s in record.arrivals)
            output += inside * record.completion_tokens / len(record.arrivals)
            prompt += record.prompt_tokens * _within(level, record.arrivals[0])
    for record in good:
        arrivals = record.arrivals
        if not arrivals:
            continue
        itl += _gaps_s(level, record)
        if _within(level, record.sent_s):
            first_s = arrivals[0] - record.sent_s
            ttft.append(first_s)
            prefill.append(record.prompt_tokens / first_s)
        if _within(level, record.ended_s) and record.completion_tokens > 1:
            tpot.append((arrivals[-1] - arrivals[0]) / (record.completion_tokens - 1))
    ended = [record for record in good if _within(level, record.ended_s)]
    failed = Counter(record.error for record in level.records + level.streams if record.error is not None)
    return Summary(
        concurrency=level.concurrency,
        temperature=temperature,
        window_s=window_s,
        num_requests=len(ended),
        num_errors=failed.total(),
        errors=dict(failed),
        prompt_tokens=_mean([record.prompt_tokens for record in ended]),
        completion_tokens=_mean([record.completion_tokens for record in ended]),
        tokens_are_chunks=any(not record.has_usage for record in good),
        output_tokens_per_s=_rate(output, window_s),
        total_tokens_per_s=_rate(output + prompt, window_s),
        requests_per_s=_rate(len(ended), window_s),
        prefill_tokens_per_s=Distribution.of(prefill).p50,
        ttft_ms=_ms(ttft),
        itl_ms=_ms(itl),
        tpot_ms=_ms(tpot),
        e2e_ms=_ms([record.ended_s - record.sent_s for record in ended if _within(level, record.sent_s)]),
        stream_itl_ms=_ms([gap_s for record in streams for gap_s in _gaps_s(level, record)]),
    )


def percentile(ordered: Sequence[float], part: float) -> float:
    """The quantile `part` (0 to 1) of an ordered sequence, interpolated linearly."""
    position = part * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def _gaps_s(level: Level, record: RequestResult) -> list[float]:
    """The times between two chunks of a request, if the second arrived in the window."""
    return [later - earlier for earlier, later in pairwise(record.arrivals) if _within(level, later)]


def _within(level: Level, time_s: float) -> bool:
    return level.opened_s <= time_s <= level.closed_s


def _rate(count: float, window_s: float) -> float:
    return count / window_s if window_s > 0 else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _ms(values_s: list[float]) -> Distribution:
    return Distribution.of([value * 1000 for value in values_s])
