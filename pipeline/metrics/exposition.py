"""A server's stats in Prometheus's text format.

Names that begin with `vllm:` mean what they mean in vLLM (docs.vllm.ai/en/latest/usage/metrics), so that dashboards
made for it work; there a request is one sequence of a call, and so it is here. Names that begin with `pipeline_` are
ours. docs/observability.md explains each.
"""

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.samples import Sample

from pipeline.metrics.batch_size_buckets import BATCH_SIZE_BUCKETS
from pipeline.metrics.histogram import (
    PLAN_WAIT_S,
    REQUEST_S,
    STEP_TOKENS,
    TIME_TO_FIRST_TOKEN_S,
    TOKEN_S,
    TOKENS,
    Bounds,
    N,
    summed,
)
from pipeline.metrics.stats import (
    DetokenizeCounts,
    ExecuteCounts,
    GatewayCounts,
    HistogramCounts,
    IngestCounts,
    ScheduleCounts,
    ServerStats,
    StageCounts,
    StageStats,
)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ENGINE = "0"
"""vLLM's label for one of several engines behind a door. This server is one."""
FINISHED_REASONS = ("stop", "length", "abort", "error")
"""In the order of `Finish`."""
STATES = ("starting", "ready", "late", "stopping", "dead")


def text_of(stats: ServerStats) -> bytes:
    """What GET /metrics answers.

    The library's own generate_latest says the same (a test compares them) and takes several times as long, in which
    the gateway would serve nobody else.
    """
    lines: list[str] = []
    for family in families_of(stats):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        lines.append(f"# HELP {name} {family.documentation}\n# TYPE {name} {family.type}\n")
        lines += map(_line, family.samples)
    return "".join(lines).encode()


def families_of(stats: ServerStats) -> Iterator[Metric]:
    yield from _vllm(stats)
    yield from _process(stats)
    yield from _stages(stats)
    yield from _parts(stats)


def _line(sample: Sample) -> str:
    labels = ",".join([f'{name}="{_escaped(value)}"' for name, value in sample.labels.items()])
    return f"{sample.name}{{{labels}}} {sample.value}\n" if labels else f"{sample.name} {sample.value}\n"


def _escaped(value: str) -> str:
    if value.isalnum():
        return value
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


# ---------------------------------------------------------------------------------------------------------- vLLM's


def _vllm(stats: ServerStats) -> Iterator[Metric]:
    labels = {"model_name": stats.model, "engine": ENGINE}
    schedule = next(iter(_own(stats, ScheduleCounts)), None)
    gateways = _own(stats, GatewayCounts)
    if schedule is not None:
        used = schedule.num_blocks_held / schedule.num_blocks_total if schedule.num_blocks_total else 0.0
        yield _gauge(
            "vllm:num_requests_running", "Number of requests in model execution batches.", labels, schedule.num_running
        )
        yield _gauge(
            "vllm:num_requests_waiting", "Number of requests waiting to be processed.", labels, schedule.num_waiting
        )
        yield _gauge("vllm:num_requests_swapped", "Number of requests swapped out.", labels, schedule.num_swapped)
        swap = schedule.num_swap_blocks_total
        swapped = (swap - schedule.num_swap_blocks_free) / swap if swap else 0.0
        yield _gauge("vllm:cpu_cache_usage_perc", "Swap space usage. 1 means 100 percent usage.", labels, swapped)
        yield _gauge("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", labels, used)
        yield _gauge("vllm:gpu_cache_usage_perc", "The same, by the name that older dashboards use.", labels, used)
        for name, words, value in (
            (
                "vllm:prefix_cache_queries",
                "Prefix cache queries, in terms of number of queried tokens.",
                schedule.num_prompt_tokens,
            ),
            (
                "vllm:prefix_cache_hits",
                "Prefix cache hits, in terms of number of cached tokens.",
                schedule.num_cached_tokens,
            ),
            (
                "vllm:gpu_prefix_cache_queries",
                "The same, by the name that older dashboards use.",
                schedule.num_prompt_tokens,
            ),
            (
                "vllm:gpu_prefix_cache_hits",
                "The same, by the name that older dashboards use.",
                schedule.num_cached_tokens,
            ),
            (
                "vllm:prompt_tokens",
                "Number of prefill tokens processed, those found in the prefix cache among them.",
                schedule.num_prompt_tokens,
            ),
            ("vllm:prompt_tokens_cached", "Number of cached prompt tokens.", schedule.num_cached_tokens),
            ("vllm:generation_tokens", "Number of generation tokens processed.", schedule.num_output_tokens),
            ("vllm:num_preemptions", "Cumulative number of preemptions.", schedule.num_preemptions),
        ):
            yield _counter(name, words, labels, value)
        by_source = CounterMetricFamily(
            "vllm:prompt_tokens_by_source", "Number of prompt tokens by source.", labels=[*labels, "source"]
        )
        by_source.add_metric(
            [*labels.values(), "local_compute"], schedule.num_prompt_tokens - schedule.num_cached_tokens
        )
        by_source.add_metric([*labels.values(), "local_cache_hit"], schedule.num_cached_tokens)
        yield by_source
        for name, words, histogram, bounds in (
            ("vllm:request_queue_time_seconds", "Time spent in the waiting queue.", schedule.queue_s, REQUEST_S),
            (
                "vllm:request_prefill_time_seconds",
                "Time from the first plan to the first token.",
                schedule.prefill_s,
                REQUEST_S,
            ),
            (
                "vllm:request_decode_time_seconds",
                "Time from the first token to the last.",
                schedule.decode_s,
                REQUEST_S,
            ),
            (
                "vllm:request_inference_time_seconds",
                "Time from the first plan to the last token.",
                schedule.inference_s,
                REQUEST_S,
            ),
            ("vllm:iteration_tokens_total", "Tokens computed by each step.", schedule.step_tokens, STEP_TOKENS),
        ):
            yield _histogram(name, words, labels, histogram, bounds)
    finished = CounterMetricFamily(
        "vllm:request_success", "Count of ended requests, by how they ended.", labels=[*labels, "finished_reason"]
    )
    for place, reason in enumerate(FINISHED_REASONS):
        finished.add_metric([*labels.values(), reason], sum(gateway.num_finished[place] for gateway in gateways))
    yield finished
    for name, words, part, bounds in _GATEWAY_HISTOGRAMS:
        yield _histogram(name, words, labels, summed(map(part, gateways), bounds), bounds)
    info = {
        "block_size": str(stats.block_size),
        "num_gpu_blocks": str(stats.num_blocks),
        "num_cpu_blocks": str(schedule.num_swap_blocks_total if schedule is not None else 0),
    }
    yield _gauge("vllm:cache_config_info", "What the KV cache is made of.", labels | info, 1)


_GATEWAY_HISTOGRAMS: tuple[tuple[str, str, Callable[[GatewayCounts], HistogramCounts], Bounds], ...] = (
    (
        "vllm:time_to_first_token_seconds",
        "Time from the request to its first token.",
        lambda c: c.time_to_first_token_s,
        TIME_TO_FIRST_TOKEN_S,
    ),
    ("vllm:inter_token_latency_seconds", "Time between tokens.", lambda c: c.inter_token_s, TOKEN_S),
    (
        "vllm:time_per_output_token_seconds",
        "The same, by the name that older dashboards use.",
        lambda c: c.inter_token_s,
        TOKEN_S,
    ),
    (
        "vllm:request_time_per_output_token_seconds",
        "Mean time between the tokens of each request.",
        lambda c: c.time_per_output_token_s,
        TOKEN_S,
    ),
    ("vllm:e2e_request_latency_seconds", "Time from the request to its last token.", lambda c: c.e2e_s, REQUEST_S),
    ("vllm:request_prompt_tokens", "Tokens of each request's prompt.", lambda c: c.prompt_tokens, TOKENS),
    ("vllm:request_generation_tokens", "Tokens generated for each request.", lambda c: c.output_tokens, TOKENS),
    (
        "vllm:request_params_max_tokens",
        "The max_tokens parameter of requests that have one.",
        lambda c: c.max_tokens,
        TOKENS,
    ),
    (
        "vllm:request_max_num_generation_tokens",
        "Tokens of the longest sequence of each prompt.",
        lambda c: c.longest_output_tokens,
        TOKENS,
    ),
    ("vllm:request_params_n", "The n parameter of requests.", lambda c: c.n, N),
)


# ------------------------------------------------------------------------------------------------------------ ours


def _process(stats: ServerStats) -> Iterator[Metric]:
    info = {"version": stats.version, "model_name": stats.model, "server": stats.server, "state": stats.state}
    yield _gauge("pipeline_server_info", "This server; the value is 1.", info, 1)
    yield _gauge("pipeline_uptime_seconds", "Since the supervisor was started.", {}, stats.uptime_s)
    yield _gauge("pipeline_max_model_len", "Longest prompt plus output, in tokens.", {}, stats.max_model_len)
    gateways = _own(stats, GatewayCounts)
    yield _gauge("pipeline_open_requests", "Prompts that gateways hold open.", {}, sum(c.num_open for c in gateways))
    yield _gauge("pipeline_open_sequences", "Sequences of them.", {}, sum(c.num_open_sequences for c in gateways))
    yield _gauge(
        "pipeline_max_open_sequences",
        "Above which no request is let in.",
        {},
        sum(c.max_open_sequences for c in gateways),
    )
    yield _gauge(
        "pipeline_open_tokens",
        "Prompt tokens of open requests, estimated where ingest has not made them.",
        {},
        sum(c.num_open_tokens for c in gateways),
    )
    yield _gauge(
        "pipeline_max_open_tokens",
        "Above which no request is let in, but one alone.",
        {},
        sum(c.max_open_tokens for c in gateways),
    )
    for name, words, value in (
        ("pipeline_sequences_opened", "Sequences let in.", sum(c.num_opened for c in gateways)),
        (
            "pipeline_sequences_rejected",
            "Sequences refused by ingest or schedule.",
            sum(c.num_rejected for c in gateways),
        ),
        (
            "pipeline_calls_overloaded",
            "Calls turned away with 503: as much is open as may be.",
            sum(c.num_overloaded for c in gateways),
        ),
        ("pipeline_calls_timed_out", "Calls ended at their deadline.", sum(c.num_timed_out for c in gateways)),
    ):
        yield _counter(name, words, {}, value)


def _stages(stats: ServerStats) -> Iterator[Metric]:
    """What every stage has."""
    state = GaugeMetricFamily("pipeline_stage_state", "1 for the state it is in.", labels=["stage", "state"])
    for stage in stats.stages:
        for name in STATES:
            state.add_metric([stage.name, name], float(stage.state == name))
    yield state
    for name, words, of in _STAGE_GAUGES:
        yield _by_stage(GaugeMetricFamily(name, words, labels=["stage"]), stats.stages, of)
    for name, words, of in _STAGE_COUNTERS:
        yield _by_stage(CounterMetricFamily(name, words, labels=["stage"]), stats.stages, of)
    sent = CounterMetricFamily("pipeline_edge_messages_sent", "Messages sent to a peer.", labels=["stage", "to"])
    refused = CounterMetricFamily(
        "pipeline_edge_messages_refused", "Sends that found the edge at its bound.", labels=["stage", "to"]
    )
    for stage in stats.stages:
        for edge in stage.counts.edges if stage.counts is not None else ():
            sent.add_metric([stage.name, edge.to], edge.num_sent)
            refused.add_metric([stage.name, edge.to], edge.num_refused)
    yield sent
    yield refused


def _of_counts(get: Callable[[StageCounts], float]) -> Callable[[StageStats], float | None]:
    return lambda stage: None if stage.counts is None else get(stage.counts)


def _of_process(get: Callable[[StageStats], float]) -> Callable[[StageStats], float | None]:
    return lambda stage: get(stage) if stage.has_process else None


_STAGE_GAUGES: tuple[tuple[str, str, Callable[[StageStats], float | None]], ...] = (
    ("pipeline_stage_resident_memory_bytes", "Resident memory of the process.", _of_process(lambda s: s.rss_bytes)),
    ("pipeline_stage_threads", "Threads of the process.", _of_process(lambda s: s.num_threads)),
    ("pipeline_stage_uptime_seconds", "Since the process was started.", lambda s: s.uptime_s),
    (
        "pipeline_stage_counts_age_seconds",
        "How old its counts are: above 0 where it did not answer in time.",
        lambda s: s.counts_age_s,
    ),
    ("pipeline_stage_queue", "What waits in the stage for its turn.", _of_counts(lambda c: c.num_queued)),
    ("pipeline_stage_arena_bytes", "Size of its shared-memory segment.", _of_counts(lambda c: c.arena_bytes)),
    (
        "pipeline_stage_arena_used_bytes",
        "Of it, what readers have not released.",
        _of_counts(lambda c: c.arena_bytes_used),
    ),
)
_STAGE_COUNTERS: tuple[tuple[str, str, Callable[[StageStats], float | None]], ...] = (
    ("pipeline_stage_restarts", "Restarts of the stage.", lambda s: s.num_restarts),
    ("pipeline_stage_cpu_seconds", "Processor time, of all its threads.", _of_process(lambda s: s.cpu_s)),
    ("pipeline_stage_messages_received", "Messages taken from its inbox.", _of_counts(lambda c: c.num_received)),
    (
        "pipeline_stage_messages_stale",
        "Messages dropped: of an incarnation that is over.",
        _of_counts(lambda c: c.num_stale),
    ),
    ("pipeline_stage_wakes", "Times its loop woke.", _of_counts(lambda c: c.num_wakes)),
    (
        "pipeline_stage_wait_seconds",
        "Time its loop waited for messages; of gateway and ingest, time messages waited for the loop.",
        _of_counts(lambda c: c.wait_s),
    ),
)


def _parts(stats: ServerStats) -> Iterator[Metric]:
    """What one kind of stage has."""
    ingest = _per_stage(stats, IngestCounts)
    yield _named("pipeline_ingest_tokens", "Tokens of the prompts it has accepted.", ingest, lambda c: c.num_tokens)
    yield _named("pipeline_ingest_accepted", "Prompts accepted.", ingest, lambda c: c.num_accepted)
    yield _named("pipeline_ingest_rejected", "Prompts rejected.", ingest, lambda c: c.num_rejected)
    yield _named("pipeline_ingest_encode_seconds", "Time spent on prompts.", ingest, lambda c: c.encode_s)
    schedule = _per_stage(stats, ScheduleCounts)
    yield _named("pipeline_schedule_steps", "Steps planned.", schedule, lambda c: c.num_steps)
    yield _named("pipeline_schedule_plan_seconds", "Time spent on plans.", schedule, lambda c: c.plan_s)
    yield _named("pipeline_schedule_settle_seconds", "Time spent on results.", schedule, lambda c: c.settle_s)
    for name, counts in schedule:
        words = "Time without a step to compute although there was work to plan, for each step that followed a result."
        waits = counts.plan_wait_s
        yield _histogram("pipeline_schedule_plan_wait_seconds", words, {"stage": name}, waits, PLAN_WAIT_S)
        yield from _gaps(name, counts)
        yield _gauge("pipeline_schedule_depth", "Steps in flight at most, as it is now.", {"stage": name}, counts.depth)
    yield _named("pipeline_schedule_forks", "Sequences begun from a sibling's.", schedule, lambda c: c.num_forks)
    yield _named(
        "pipeline_schedule_blocks_swapped_out",
        "KV blocks copied to swap space.",
        schedule,
        lambda c: c.num_blocks_swapped_out,
    )
    yield _named(
        "pipeline_schedule_blocks_swapped_in",
        "KV blocks copied back.",
        schedule,
        lambda c: c.num_blocks_swapped_in,
    )
    swap = GaugeMetricFamily("pipeline_swap_blocks", "Blocks of swap space by state.", labels=["stage", "state"])
    for name, counts in schedule:
        swap.add_metric([name, "free"], counts.num_swap_blocks_free)
        swap.add_metric([name, "held"], counts.num_swap_blocks_total - counts.num_swap_blocks_free)
    yield swap
    blocks = GaugeMetricFamily("pipeline_kv_blocks", "KV blocks by state.", labels=["stage", "state"])
    for name, counts in schedule:
        blocks.add_metric([name, "free"], counts.num_blocks_free)
        blocks.add_metric([name, "cached"], counts.num_blocks_cached)
        blocks.add_metric([name, "held"], counts.num_blocks_held)
    yield blocks
    execute = _per_stage(stats, ExecuteCounts)
    yield _named("pipeline_execute_steps", "Steps computed.", execute, lambda c: c.num_steps)
    yield _named("pipeline_execute_tokens", "Positions computed.", execute, lambda c: c.num_tokens)
    yield _named("pipeline_execute_step_seconds", "Time spent on steps.", execute, lambda c: c.step_s)
    yield _named("pipeline_execute_wait_seconds", "Time without a step to compute.", execute, lambda c: c.wait_s)
    detokenize = _per_stage(stats, DetokenizeCounts)
    yield _named("pipeline_detokenize_tokens", "Tokens taken in.", detokenize, lambda c: c.num_tokens)
    yield _named("pipeline_detokenize_seconds", "Time spent on text.", detokenize, lambda c: c.settle_s)


def _gaps(name: str, counts: ScheduleCounts) -> Iterator[Metric]:
    """What the device did between steps and in them, by the size of their batch."""
    gaps = HistogramMetricFamily(
        "pipeline_step_gap_seconds",
        "Time from the end of a step to the next, by the device's clock, where there was work to plan.",
        labels=["stage", "batch"],
    )
    steps = CounterMetricFamily(
        "pipeline_step_busy_seconds", "Time that the steps behind these gaps took.", labels=["stage", "batch"]
    )
    for of_batch in counts.gaps:
        labels = [name, BATCH_SIZE_BUCKETS[of_batch.batch]]
        gaps.add_metric(labels, _buckets(of_batch.gap_s, PLAN_WAIT_S), of_batch.gap_s.total)
        steps.add_metric(labels, of_batch.step_s)
    yield gaps
    yield steps


# ----------------------------------------------------------------------------------------------------------- shapes

C = TypeVar("C")
Labels = dict[str, str]


def _own(stats: ServerStats, kind: type[C]) -> list[C]:
    return [counts for _, counts in _per_stage(stats, kind)]


def _per_stage(stats: ServerStats, kind: type[C]) -> list[tuple[str, C]]:
    """The counts of every stage of a kind that has given any."""
    return [
        (stage.name, stage.counts.own)
        for stage in stats.stages
        if stage.counts is not None and isinstance(stage.counts.own, kind)
    ]


def _gauge(name: str, words: str, labels: Labels, value: float) -> Metric:
    family = GaugeMetricFamily(name, words, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _counter(name: str, words: str, labels: Labels, value: float) -> Metric:
    family = CounterMetricFamily(name, words, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _histogram(name: str, words: str, labels: Labels, histogram: HistogramCounts, bounds: Bounds) -> Metric:
    family = HistogramMetricFamily(name, words, labels=list(labels))
    family.add_metric(list(labels.values()), _buckets(histogram, bounds), histogram.total)
    return family


def _buckets(histogram: HistogramCounts, bounds: Bounds) -> list[tuple[str, float]]:
    """They are cumulative in this format."""
    above = zip((*map(str, bounds), "+Inf"), accumulate(histogram.counts), strict=True)
    return [(bound, float(count)) for bound, count in above]


def _named(name: str, words: str, stages: list[tuple[str, C]], of: Callable[[C], float]) -> Metric:
    family = CounterMetricFamily(name, words, labels=["stage"])
    for stage, counts in stages:
        family.add_metric([stage], of(counts))
    return family


def _by_stage(
    family: GaugeMetricFamily | CounterMetricFamily,
    stages: list[StageStats],
    of: Callable[[StageStats], float | None],
) -> Metric:
    for stage in stages:
        if (value := of(stage)) is not None:
            family.add_metric([stage.name], value)
    return family
