"""Computes what `pipeline top` shows from two or more samples of a server's stats. Pure."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from pipeline.metrics.histogram import TIME_TO_FIRST_TOKEN_S, TOKEN_S, Bounds, quantile, summed
from pipeline.metrics.stats import (
    DetokenizeCounts,
    ExecuteCounts,
    GatewayCounts,
    HistogramCounts,
    IngestCounts,
    ScheduleCounts,
    ServerStats,
    StageStats,
    StateSlotCounts,
)

C = TypeVar("C")


class StageView(msgspec.Struct):
    name: str
    pid: int
    state: str
    cpu_percent: float | None
    """Percent of one core; None without an earlier sample, or without a process of its own."""
    rss_bytes: int | None
    num_queued: int | None
    messages_per_s: float | None
    busy_percent: float | None
    """Share of the time in which the loop did not wait; None for gateway and ingest, whose CPU time is more
    informative."""
    note: str
    """The stage's work, in a word or two."""


class View(msgspec.Struct):
    pid: int
    model: str
    address: str
    state: str
    uptime_s: float
    interval_s: float
    """Interval of the rates, in seconds."""
    running: int
    waiting: int
    open_requests: int
    kv_blocks_held: int
    kv_blocks_cached: int
    kv_blocks_total: int
    states: StateSlotCounts | None
    """Slots for recurrent states; None for models without them."""
    prompt_tokens_per_s: float | None
    output_tokens_per_s: float | None
    steps_per_s: float | None
    tokens_per_step: float | None
    time_to_first_token_ms: float | None
    """Median over the window; also the next ones."""
    inter_token_ms: float | None
    cached_percent: float | None
    """Share of prompt tokens since the start."""
    accepted_percent: float | None
    """Share of the tokens that speculative decoding has proposed since the start; None if it has not."""
    depth: int | None
    """Maximum of steps in flight; None before the scheduler has reported it."""
    plan_wait_percent: float | None
    """Share of the time in which the executor waited for a plan."""
    device_percent: float | None
    """Share of the time in which the device computed, for steps that were planned immediately. None without such
    steps."""
    preemptions: int
    requests_finished: int
    swapped: int
    swap_blocks_held: int
    swap_blocks_total: int
    blocks_swapped_out: int
    """Since the start; also the next ones."""
    blocks_swapped_in: int
    forks: int
    open_tokens: int
    max_open_tokens: int
    stages: list[StageView]


def view_of(history: Sequence[ServerStats]) -> View:
    """Build the view from samples of one server's stats, the newest last. Rates are since the previous sample, medians
    since the first. A single sample has no rates, and its medians are since the server's start."""
    now = history[-1]
    before = history[-2] if len(history) > 1 else None
    first = history[0] if len(history) > 1 else None
    elapsed_s = now.unix_s - before.unix_s if before else 0.0
    schedule = _counts(now, ScheduleCounts)
    gateways = _counts(now, GatewayCounts)
    prompts = sum(c.num_prompt_tokens for c in schedule)

    def rate(of: Callable[[ScheduleCounts], float]) -> float | None:
        if before is None or elapsed_s <= 0:
            return None
        gained = sum(map(of, schedule)) - sum(map(of, _counts(before, ScheduleCounts)))
        return max(0.0, gained / elapsed_s)

    drafts = sum(c.speculation.num_draft_tokens for c in schedule)
    steps_per_s = rate(lambda c: c.num_steps)
    computed_per_s = rate(lambda c: round(c.step_tokens.total))
    plan_wait = rate(lambda c: c.plan_wait_s.total)
    computing = rate(lambda c: sum(gaps.step_s for gaps in c.gaps))
    return View(
        pid=now.pid,
        model=now.model,
        address=now.address,
        state=now.state,
        uptime_s=now.uptime_s,
        interval_s=elapsed_s,
        running=sum(c.num_running for c in schedule),
        waiting=sum(c.num_waiting for c in schedule),
        open_requests=sum(c.num_open for c in gateways),
        kv_blocks_held=sum(c.num_blocks_held for c in schedule),
        kv_blocks_cached=sum(c.num_blocks_cached for c in schedule),
        kv_blocks_total=sum(c.num_blocks_total for c in schedule),
        states=next((c.states for c in schedule if c.states is not None), None),
        prompt_tokens_per_s=rate(lambda c: c.num_prompt_tokens),
        output_tokens_per_s=rate(lambda c: c.num_output_tokens),
        steps_per_s=steps_per_s,
        tokens_per_step=computed_per_s / steps_per_s if computed_per_s is not None and steps_per_s else None,
        time_to_first_token_ms=_median_ms(first, now, lambda c: c.time_to_first_token_s, TIME_TO_FIRST_TOKEN_S),
        inter_token_ms=_median_ms(first, now, lambda c: c.inter_token_s, TOKEN_S),
        cached_percent=100 * sum(c.num_cached_tokens for c in schedule) / prompts if prompts else None,
        accepted_percent=100 * sum(c.speculation.num_accepted_tokens for c in schedule) / drafts if drafts else None,
        depth=next((c.depth for c in schedule), None),
        plan_wait_percent=None if plan_wait is None else 100 * plan_wait,
        device_percent=100 * computing / (computing + plan_wait) if computing and plan_wait is not None else None,
        preemptions=sum(c.num_preemptions for c in schedule),
        requests_finished=sum(sum(c.num_finished) for c in gateways),
        swapped=sum(c.num_swapped for c in schedule),
        swap_blocks_held=sum(c.num_swap_blocks_total - c.num_swap_blocks_free for c in schedule),
        swap_blocks_total=sum(c.num_swap_blocks_total for c in schedule),
        blocks_swapped_out=sum(c.num_blocks_swapped_out for c in schedule),
        blocks_swapped_in=sum(c.num_blocks_swapped_in for c in schedule),
        forks=sum(c.num_forks for c in schedule),
        open_tokens=sum(c.num_open_tokens for c in gateways),
        max_open_tokens=sum(c.max_open_tokens for c in gateways),
        stages=[_stage_view(stage, _same(before, stage), elapsed_s, running_of(now)) for stage in now.stages],
    )


def running_of(stats: ServerStats) -> int | None:
    """Running sequences; None if schedule does not tell."""
    return next((counts.num_running for counts in _counts(stats, ScheduleCounts)), None)


def _stage_view(stage: StageStats, before: StageStats | None, elapsed_s: float, num_running: int | None) -> StageView:
    counts = stage.counts
    view = StageView(
        name=stage.name,
        pid=stage.pid,
        state=stage.state,
        cpu_percent=None,
        rss_bytes=stage.rss_bytes if stage.has_process else None,
        num_queued=None if counts is None else counts.num_queued,
        messages_per_s=None,
        busy_percent=None,
        note=note_of(stage, num_running),
    )
    if before is not None and elapsed_s > 0:
        if stage.has_process:
            view.cpu_percent = max(0.0, 100 * (stage.cpu_s - before.cpu_s) / elapsed_s)
        if counts is not None and before.counts is not None and stage.counts_age_s == 0:
            view.messages_per_s = max(0.0, (counts.num_received - before.counts.num_received) / elapsed_s)
            if not isinstance(counts.own, GatewayCounts | IngestCounts):
                waited_s = counts.wait_s - before.counts.wait_s
                view.busy_percent = min(100.0, max(0.0, 100 * (1 - waited_s / elapsed_s)))
    return view


def note_of(stage: StageStats, num_running: int | None) -> str:
    """A stage's work, in a word or two, how often its process was replaced, and its host if that is another one.
    `num_running` are the server's running sequences: the executor keeps rows that have ended until the next step."""
    restarts = f"↻{stage.num_restarts}" if stage.num_restarts else ""
    node = f"on {stage.node}" if stage.node else ""
    return " ".join(part for part in (_work_of(stage, num_running), restarts, node) if part)


def _work_of(stage: StageStats, num_running: int | None) -> str:
    if stage.counts is None:
        return ""
    match stage.counts.own:
        case GatewayCounts() as own:
            return f"{own.num_open} open"
        case IngestCounts() as own:
            return f"{own.num_encoding} long" if own.num_encoding else ""
        case ScheduleCounts() as own:
            return f"{own.num_running} running"
        case ExecuteCounts() as own:
            num_rows = own.num_rows if num_running is None else min(own.num_rows, num_running)
            rows = "1 row" if num_rows == 1 else f"{num_rows} rows"
            return f"{own.rank_name} {rows}" if own.rank_name else rows
        case DetokenizeCounts() as own:
            return f"{own.num_sequences} live"
        case None:
            return ""


def _counts(stats: ServerStats, kind: type[C]) -> list[C]:
    found = [stage.counts.own for stage in stats.stages if stage.counts is not None]
    return [own for own in found if isinstance(own, kind)]


def _same(stats: ServerStats | None, stage: StageStats) -> StageStats | None:
    """The stats of the same process in an earlier sample."""
    stages = stats.stages if stats is not None else []
    return next((one for one in stages if (one.name, one.pid) == (stage.name, stage.pid)), None)


def _median_ms(
    first: ServerStats | None, now: ServerStats, of: Callable[[GatewayCounts], HistogramCounts], bounds: Bounds
) -> float | None:
    newest = summed(map(of, _counts(now, GatewayCounts)), bounds)
    if first is not None:
        oldest = summed(map(of, _counts(first, GatewayCounts)), bounds)
        gained = [max(0, ours - theirs) for ours, theirs in zip(newest.counts, oldest.counts, strict=True)]
        newest = HistogramCounts(gained, newest.total - oldest.total)
    median_s = quantile(newest, bounds, 0.5)
    return None if median_s is None else 1000 * median_s
