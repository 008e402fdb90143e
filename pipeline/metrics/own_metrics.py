"""Metrics of Pipeline's own: the server, each stage, and each kind of stage."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from pipeline.metrics.batch_size_buckets import BATCH_SIZE_BUCKETS
from pipeline.metrics.families import (
    by_stage,
    counter,
    counter_by_stage,
    counts_by_stage,
    counts_of,
    cumulative_buckets,
    gauge,
    histogram,
)
from pipeline.metrics.histogram import PLAN_WAIT_S
from pipeline.metrics.media_metrics import media_metrics
from pipeline.metrics.state_metrics import state_metrics
from pipeline.metrics.stats import (
    DetokenizeCounts,
    ExecuteCounts,
    GatewayCounts,
    IngestCounts,
    KeyUsage,
    ScheduleCounts,
    ServerStats,
    SleepCounts,
    StageCounts,
    StageStats,
)

STATES = ("starting", "ready", "late", "recovering", "joining", "leaving", "sleeping", "waking", "stopping", "dead")


def server_metrics(stats: ServerStats) -> Iterator[Metric]:
    info = {"version": stats.version, "model_name": stats.model, "server": stats.server, "state": stats.state}
    info |= {"quantization": stats.quantization, "backend": stats.backend}
    yield gauge("pipeline_server_info", "This server; the value is 1.", info, 1)
    yield gauge("pipeline_uptime_seconds", "Time since the supervisor started.", {}, stats.uptime_s)
    yield gauge("pipeline_max_model_len", "Longest prompt plus output, in tokens.", {}, stats.max_model_len)
    gateways = counts_of(stats, GatewayCounts)
    yield gauge("pipeline_open_requests", "Open prompts at all gateways.", {}, sum(c.num_open for c in gateways))
    yield gauge(
        "pipeline_open_sequences", "Open sequences at all gateways.", {}, sum(c.num_open_sequences for c in gateways)
    )
    yield gauge(
        "pipeline_max_open_sequences",
        "Limit of open sequences.",
        {},
        sum(c.max_open_sequences for c in gateways),
    )
    yield gauge(
        "pipeline_open_tokens",
        "Prompt tokens of open requests, estimated until ingest has tokenized them.",
        {},
        sum(c.num_open_tokens for c in gateways),
    )
    yield gauge(
        "pipeline_max_open_tokens",
        "Limit of open prompt tokens; a single request may exceed it.",
        {},
        sum(c.max_open_tokens for c in gateways),
    )
    yield gauge(
        "pipeline_open_bytes",
        "What open requests keep in all processes.",
        {},
        sum(c.num_open_bytes for c in gateways),
    )
    yield gauge("pipeline_max_open_bytes", "Limit of open bytes.", {}, sum(c.max_open_bytes for c in gateways))
    num_media, max_media = (sum(getattr(c, f"{name}_open_media_bytes") for c in gateways) for name in ("num", "max"))
    yield gauge("pipeline_open_media_bytes", "Encoded images that open requests keep in all processes.", {}, num_media)
    yield gauge("pipeline_max_open_media_bytes", "Limit of open bytes of images.", {}, max_media)
    yield gauge(
        "pipeline_requests_preempted",
        "Requests that wait for room in the limit of open bytes, after some output.",
        {},
        sum(c.num_preempted for c in gateways),
    )
    for name, words, value in (
        ("pipeline_sequences_opened", "Sequences admitted.", sum(c.num_opened for c in gateways)),
        (
            "pipeline_sequences_rejected",
            "Sequences rejected by ingest or schedule.",
            sum(c.num_rejected for c in gateways),
        ),
        (
            "pipeline_requests_overloaded",
            "Requests answered with 503 because of a limit on open requests.",
            sum(c.num_overloaded for c in gateways),
        ),
        (
            "pipeline_requests_timed_out",
            "Requests that ended at their deadline.",
            sum(c.num_timed_out for c in gateways),
        ),
        *(
            (f"pipeline_calls_{what}", f"The old name of pipeline_requests_{what}, for one release.", value)
            for what, value in (
                ("overloaded", sum(c.num_overloaded for c in gateways)),
                ("timed_out", sum(c.num_timed_out for c in gateways)),
            )
        ),
        (
            "pipeline_request_preemptions",
            "How often a request was preempted because open requests kept too many bytes.",
            sum(c.num_preemptions for c in gateways),
        ),
        (
            "pipeline_replies_given_up",
            "Replies and streams whose clients took them too slowly while others needed their room.",
            sum(c.num_given_up for c in gateways),
        ),
        (
            "pipeline_access_log_dropped_lines",
            "Lines of the access log that were not written: the file was too slow, or could not be written.",
            sum(c.num_log_lines_dropped for c in gateways),
        ),
    ):
        yield counter(name, words, {}, value)
    yield from _sleep_metrics(stats.sleep)
    yield from _pooled_metrics(gateways)


def _sleep_metrics(counts: SleepCounts) -> Iterator[Metric]:
    """The server's sleeps."""
    yield gauge("pipeline_asleep", "1 while the server sleeps.", {}, int(counts.is_asleep))
    yield counter("pipeline_sleeps", "How often the server has fallen asleep.", {}, counts.num_sleeps)
    yield counter("pipeline_sleep_saved_bytes", "Bytes of KV cache that executors have saved.", {}, counts.num_bytes)
    yield counter("pipeline_sleep_seconds", "Time to fall asleep.", {}, counts.sleep_s)
    yield counter("pipeline_wake_seconds", "Time to wake up.", {}, counts.wake_s)


def _pooled_metrics(gateways: Sequence[GatewayCounts]) -> Iterator[Metric]:
    """What was asked of the model besides text, by task."""
    tasks = sorted({task for gateway in gateways for task in gateway.pooled})
    for index, (what, words) in enumerate(
        (
            ("requests", "Requests for embeddings, scores or labels that were opened."),
            ("inputs", "Inputs of such requests that were computed."),
            ("tokens", "Tokens of these inputs."),
        )
    ):
        family = CounterMetricFamily(f"pipeline_pooling_{what}", words, labels=["task"])
        for task in tasks:
            family.add_metric(
                [task], sum(gateway.pooled[task][index] for gateway in gateways if task in gateway.pooled)
            )
        yield family


_KEY_COUNTERS: tuple[tuple[str, str, Callable[[KeyUsage], int]], ...] = (
    ("pipeline_key_requests", "Requests of an API key that were opened.", lambda key: key.num_requests),
    ("pipeline_key_prompt_tokens", "Prompt tokens of an API key.", lambda key: key.num_prompt_tokens),
    (
        "pipeline_key_cached_tokens",
        "Prompt tokens of an API key found in the prefix cache.",
        lambda key: key.num_cached_tokens,
    ),
    ("pipeline_key_output_tokens", "Tokens generated for an API key.", lambda key: key.num_output_tokens),
)
_KEY_REFUSALS: tuple[tuple[str, Callable[[KeyUsage], int]], ...] = (
    ("rate_limit", lambda key: key.num_rate_limited),
    ("overloaded", lambda key: key.num_overloaded),
    ("invalid", lambda key: key.num_invalid),
)


def key_metrics(stats: ServerStats) -> Iterator[Metric]:
    """What each API key has used, by its name. Only keys that the operator has configured have series."""
    if not stats.keys:
        return
    for name, words, of in _KEY_COUNTERS:
        family = CounterMetricFamily(name, words, labels=["key"])
        for key in stats.keys:
            family.add_metric([key.name], of(key))
        yield family
    refused = CounterMetricFamily(
        "pipeline_key_rejected",
        "Requests of an API key that were refused before they were opened.",
        labels=["key", "reason"],
    )
    for key in stats.keys:
        for reason, num in _KEY_REFUSALS:
            refused.add_metric([key.name, reason], num(key))
    yield refused


def stage_metrics(stats: ServerStats) -> Iterator[Metric]:
    """Metrics of every stage."""
    state = GaugeMetricFamily("pipeline_stage_state", "1 for the current state.", labels=["stage", "state"])
    for stage in stats.stages:
        for name in STATES:
            state.add_metric([stage.name, name], float(stage.state == name))
    yield state
    for name, words, of in _STAGE_GAUGES:
        yield by_stage(GaugeMetricFamily(name, words, labels=["stage"]), stats.stages, of)
    for name, words, of in _STAGE_COUNTERS:
        yield by_stage(CounterMetricFamily(name, words, labels=["stage"]), stats.stages, of)
    sent = CounterMetricFamily("pipeline_edge_messages_sent", "Messages sent to a peer.", labels=["stage", "to"])
    refused = CounterMetricFamily(
        "pipeline_edge_messages_refused", "Sends refused because the edge was full.", labels=["stage", "to"]
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
    ("pipeline_stage_uptime_seconds", "Time since the process started.", lambda s: s.uptime_s),
    (
        "pipeline_stage_counts_age_seconds",
        "Age of the stage's counts; above 0 if it did not answer in time.",
        lambda s: s.counts_age_s,
    ),
    ("pipeline_stage_queue", "Work that waits in the stage.", _of_counts(lambda c: c.num_queued)),
    ("pipeline_stage_arena_bytes", "Size of the stage's shared-memory segment.", _of_counts(lambda c: c.arena_bytes)),
    (
        "pipeline_stage_arena_used_bytes",
        "Part of the segment that readers have not released.",
        _of_counts(lambda c: c.arena_bytes_used),
    ),
)
_STAGE_COUNTERS: tuple[tuple[str, str, Callable[[StageStats], float | None]], ...] = (
    ("pipeline_stage_restarts", "Restarts of the stage.", lambda s: s.num_restarts),
    ("pipeline_stage_cpu_seconds", "CPU time of all threads.", _of_process(lambda s: s.cpu_s)),
    ("pipeline_stage_messages_received", "Messages received.", _of_counts(lambda c: c.num_received)),
    (
        "pipeline_stage_messages_stale",
        "Messages dropped because their incarnation has ended.",
        _of_counts(lambda c: c.num_stale),
    ),
    ("pipeline_stage_wakes", "Wakeups of the loop.", _of_counts(lambda c: c.num_wakes)),
    (
        "pipeline_stage_wait_seconds",
        "Time the loop waited for messages; in gateway and ingest, time messages waited for the loop.",
        _of_counts(lambda c: c.wait_s),
    ),
)


def kind_metrics(stats: ServerStats) -> Iterator[Metric]:
    """Metrics of one kind of stage."""
    ingest = counts_by_stage(stats, IngestCounts)
    yield counter_by_stage("pipeline_ingest_tokens", "Tokens of accepted prompts.", ingest, lambda c: c.num_tokens)
    yield counter_by_stage("pipeline_ingest_accepted", "Prompts accepted.", ingest, lambda c: c.num_accepted)
    yield counter_by_stage("pipeline_ingest_rejected", "Prompts rejected.", ingest, lambda c: c.num_rejected)
    yield counter_by_stage(
        "pipeline_ingest_encode_seconds", "Time spent on accepted prompts.", ingest, lambda c: c.encode_s
    )
    schedule = counts_by_stage(stats, ScheduleCounts)
    yield counter_by_stage("pipeline_schedule_steps", "Steps planned.", schedule, lambda c: c.num_steps)
    yield counter_by_stage("pipeline_schedule_plan_seconds", "Time spent on planning.", schedule, lambda c: c.plan_s)
    yield counter_by_stage("pipeline_schedule_settle_seconds", "Time spent on results.", schedule, lambda c: c.settle_s)
    for name, counts in schedule:
        words = "Time the executor waited for a step although there was work to plan."
        waits = counts.plan_wait_s
        yield histogram("pipeline_schedule_plan_wait_seconds", words, {"stage": name}, waits, PLAN_WAIT_S)
        yield from _gaps(name, counts)
        yield gauge("pipeline_schedule_depth", "Current maximum of steps in flight.", {"stage": name}, counts.depth)
    yield counter_by_stage(
        "pipeline_schedule_forks", "Sequences forked from a sibling's prompt.", schedule, lambda c: c.num_forks
    )
    yield counter_by_stage(
        "pipeline_schedule_recomputed_prompt_tokens",
        "Prompt tokens computed a second time, after a preemption or a death.",
        schedule,
        lambda c: c.num_recomputed_tokens,
    )
    yield counter_by_stage(
        "pipeline_schedule_blocks_swapped_out",
        "KV blocks copied to swap space.",
        schedule,
        lambda c: c.num_blocks_swapped_out,
    )
    yield counter_by_stage(
        "pipeline_schedule_blocks_swapped_in",
        "KV blocks copied back from swap space.",
        schedule,
        lambda c: c.num_blocks_swapped_in,
    )
    yield counter_by_stage(
        "pipeline_schedule_blocks_offloaded",
        "Full KV blocks copied to swap space when they were computed.",
        schedule,
        lambda c: c.num_blocks_offloaded,
    )
    yield counter_by_stage(
        "pipeline_schedule_blocks_restored",
        "Offloaded KV blocks copied back instead of being computed again.",
        schedule,
        lambda c: c.num_blocks_restored,
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
    groups = GaugeMetricFamily(
        "pipeline_kv_group_blocks",
        "KV blocks of running sequences, by group of layers and its sliding window; shared ones count for each.",
        labels=["stage", "group", "window"],
    )
    for name, counts in schedule:
        for index, group in enumerate(counts.kv_groups):
            groups.add_metric([name, str(index), str(group.window)], group.num_blocks)
    yield groups
    yield from state_metrics(stats)
    yield from media_metrics(stats)
    execute = counts_by_stage(stats, ExecuteCounts)
    yield counter_by_stage("pipeline_execute_steps", "Steps computed.", execute, lambda c: c.num_steps)
    yield counter_by_stage("pipeline_execute_tokens", "Positions computed.", execute, lambda c: c.num_tokens)
    yield counter_by_stage("pipeline_execute_step_seconds", "Time spent on steps.", execute, lambda c: c.step_s)
    yield counter_by_stage(
        "pipeline_execute_wait_seconds", "Time without a step to compute.", execute, lambda c: c.wait_s
    )
    yield counter_by_stage(
        "pipeline_execute_barrier_seconds",
        "Time of steps in which this rank waited for others.",
        execute,
        lambda c: c.barrier_s,
    )
    yield counter_by_stage(
        "pipeline_execute_pipeline_wait_seconds",
        "Time of steps in which this rank waited for other stages of the pipeline.",
        execute,
        lambda c: c.pipeline_wait_s,
    )
    detokenize = counts_by_stage(stats, DetokenizeCounts)
    yield counter_by_stage("pipeline_detokenize_tokens", "Tokens received.", detokenize, lambda c: c.num_tokens)
    yield counter_by_stage(
        "pipeline_detokenize_seconds", "Time spent on detokenization.", detokenize, lambda c: c.settle_s
    )


def _gaps(name: str, counts: ScheduleCounts) -> Iterator[Metric]:
    """Gaps between steps and the duration of steps, by batch size."""
    gaps = HistogramMetricFamily(
        "pipeline_step_gap_seconds",
        "Time from the end of a step to the next by the device's clock, if there was work to plan.",
        labels=["stage", "batch"],
    )
    steps = CounterMetricFamily(
        "pipeline_step_busy_seconds", "Duration of the steps after these gaps.", labels=["stage", "batch"]
    )
    for of_batch in counts.gaps:
        labels = [name, BATCH_SIZE_BUCKETS[of_batch.batch]]
        gaps.add_metric(labels, cumulative_buckets(of_batch.gap_s, PLAN_WAIT_S), of_batch.gap_s.total)
        steps.add_metric(labels, of_batch.step_s)
    yield gaps
    yield steps
