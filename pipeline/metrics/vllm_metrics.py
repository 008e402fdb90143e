"""Metrics with the names and meanings of vLLM (docs.vllm.ai/en/latest/usage/metrics), so that its dashboards work.

As in vLLM, "request" means one sequence here.
"""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pipeline.metrics.families import counter, counts_of, gauge, histogram
from pipeline.metrics.histogram import REQUEST_S, STEP_TOKENS, TIME_TO_FIRST_TOKEN_S, TOKEN_S, TOKENS, Bounds, N, summed
from pipeline.metrics.stats import (
    AdapterCounts,
    ExecuteCounts,
    GatewayCounts,
    HistogramCounts,
    IngestCounts,
    ScheduleCounts,
    ServerStats,
    SpeculationCounts,
)

ENGINE = "0"
"""vLLM's label for one of several engines behind one API server. A Pipeline server has one."""
FINISHED_REASONS = ("stop", "length", "abort", "error")
"""In the order of `Finish`."""


def vllm_metrics(stats: ServerStats) -> Iterator[Metric]:
    labels = {"model_name": stats.model, "engine": ENGINE}
    schedule = next(iter(counts_of(stats, ScheduleCounts)), None)
    gateways = counts_of(stats, GatewayCounts)
    if schedule is not None:
        used = schedule.num_blocks_held / schedule.num_blocks_total if schedule.num_blocks_total else 0.0
        yield gauge(
            "vllm:num_requests_running", "Number of requests in model execution batches.", labels, schedule.num_running
        )
        yield gauge(
            "vllm:num_requests_waiting", "Number of requests waiting to be processed.", labels, schedule.num_waiting
        )
        by_reason = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Number of waiting requests by reason. All wait for capacity; nothing defers a request.",
            labels=[*labels, "reason"],
        )
        by_reason.add_metric([*labels.values(), "capacity"], schedule.num_waiting)
        by_reason.add_metric([*labels.values(), "deferred"], 0)
        yield by_reason
        yield gauge("vllm:num_requests_swapped", "Number of requests swapped out.", labels, schedule.num_swapped)
        swap = schedule.num_swap_blocks_total
        swapped = (swap - schedule.num_swap_blocks_free) / swap if swap else 0.0
        yield gauge("vllm:cpu_cache_usage_perc", "Swap space usage. 1 means 100 percent usage.", labels, swapped)
        yield gauge("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", labels, used)
        yield gauge("vllm:gpu_cache_usage_perc", "The same, under the name of older dashboards.", labels, used)
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
                "The same, under the name of older dashboards.",
                schedule.num_prompt_tokens,
            ),
            (
                "vllm:gpu_prefix_cache_hits",
                "The same, under the name of older dashboards.",
                schedule.num_cached_tokens,
            ),
            (
                "vllm:prompt_tokens",
                "Number of prefill tokens processed, including those found in the prefix cache.",
                schedule.num_prompt_tokens,
            ),
            ("vllm:prompt_tokens_cached", "Number of cached prompt tokens.", schedule.num_cached_tokens),
            ("vllm:generation_tokens", "Number of generation tokens processed.", schedule.num_output_tokens),
            ("vllm:num_preemptions", "Cumulative number of preemptions.", schedule.num_preemptions),
        ):
            yield counter(name, words, labels, value)
        by_source = CounterMetricFamily(
            "vllm:prompt_tokens_by_source", "Number of prompt tokens by source.", labels=[*labels, "source"]
        )
        by_source.add_metric(
            [*labels.values(), "local_compute"], schedule.num_prompt_tokens - schedule.num_cached_tokens
        )
        by_source.add_metric([*labels.values(), "local_cache_hit"], schedule.num_cached_tokens)
        yield by_source
        for name, words, values, bounds in (
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
            ("vllm:iteration_tokens_total", "Tokens computed per step.", schedule.step_tokens, STEP_TOKENS),
        ):
            yield histogram(name, words, labels, values, bounds)
        if schedule.speculation.num_accepted_per_pos:
            yield from _speculation(schedule.speculation, labels)
        if schedule.adapters is not None:
            yield _adapters(schedule.adapters, stats)
    finished = CounterMetricFamily(
        "vllm:request_success", "Count of ended requests by reason.", labels=[*labels, "finished_reason"]
    )
    for index, reason in enumerate(FINISHED_REASONS):
        finished.add_metric([*labels.values(), reason], sum(gateway.num_finished[index] for gateway in gateways))
    yield finished
    refused = CounterMetricFamily(
        "vllm:admission_rejections",
        "Number of requests answered with 503 on arrival, by the limit that was reached.",
        labels=["model_name", "reason"],
    )
    by_size = sum(gateway.num_overloaded_by_size for gateway in gateways)
    refused.add_metric([stats.model, "max_num_queued_reqs"], sum(one.num_overloaded for one in gateways) - by_size)
    refused.add_metric([stats.model, "max_num_queued_tokens"], by_size)
    yield refused
    if executors := list(counts_of(stats, ExecuteCounts)):
        yield counter(
            "vllm:corrupted_requests",
            "Number of requests that failed because their logits were NaN.",
            labels,
            sum(one.num_nan for one in executors),
        )
    if images := [one.images for one in counts_of(stats, IngestCounts) if one.images is not None]:
        for name, words, value in (
            ("queries", "Multi-modal cache queries, in images.", sum(one.num_queries for one in images)),
            ("hits", "Multi-modal cache hits, in images.", sum(one.num_hits for one in images)),
        ):
            yield counter(f"vllm:mm_cache_{name}", words, labels, value)
    for name, words, part, bounds in _GATEWAY_HISTOGRAMS:
        yield histogram(name, words, labels, summed(map(part, gateways), bounds), bounds)
    info = {
        "block_size": str(stats.block_size),
        "cache_dtype": stats.kv_dtype,
        "num_gpu_blocks": str(stats.num_blocks),
        "num_cpu_blocks": str(schedule.num_swap_blocks_total if schedule is not None else 0),
    }
    yield gauge("vllm:cache_config_info", "Configuration of the KV cache.", labels | info, 1)


def _adapters(counts: AdapterCounts, stats: ServerStats) -> Metric:
    """As in vLLM, the value is the time, and the adapters are labels."""
    names = {adapter_id: name for name, adapter_id in stats.adapters.items()}
    info = {
        "running_lora_adapters": ",".join(names.get(one, one) for one in counts.running),
        "waiting_lora_adapters": ",".join(names.get(one, one) for one in counts.waiting),
        "max_lora": str(counts.max_loras),
    }
    return gauge("vllm:lora_requests_info", "Running stats on LoRA requests.", info, stats.unix_s)


def _speculation(counts: SpeculationCounts, labels: dict[str, str]) -> Iterator[Metric]:
    for name, words, value in (
        ("drafts", "Number of spec decoding drafts.", counts.num_drafts),
        ("draft_tokens", "Number of draft tokens.", counts.num_draft_tokens),
        ("accepted_tokens", "Number of accepted tokens.", counts.num_accepted_tokens),
    ):
        yield counter(f"vllm:spec_decode_num_{name}", words, labels, value)
    by_position = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Accepted tokens per draft position.",
        labels=[*labels, "position"],
    )
    for position, value in enumerate(counts.num_accepted_per_pos):
        by_position.add_metric([*labels.values(), str(position)], value)
    yield by_position


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
        "The same, under the name of older dashboards.",
        lambda c: c.inter_token_s,
        TOKEN_S,
    ),
    (
        "vllm:request_time_per_output_token_seconds",
        "Mean time between tokens per request.",
        lambda c: c.time_per_output_token_s,
        TOKEN_S,
    ),
    ("vllm:e2e_request_latency_seconds", "Time from the request to its last token.", lambda c: c.e2e_s, REQUEST_S),
    ("vllm:request_prompt_tokens", "Prompt tokens per request.", lambda c: c.prompt_tokens, TOKENS),
    ("vllm:request_generation_tokens", "Generated tokens per request.", lambda c: c.output_tokens, TOKENS),
    (
        "vllm:request_params_max_tokens",
        "The max_tokens parameter, for requests that set it.",
        lambda c: c.max_tokens,
        TOKENS,
    ),
    (
        "vllm:request_max_num_generation_tokens",
        "Generated tokens of the longest sequence of each prompt.",
        lambda c: c.longest_output_tokens,
        TOKENS,
    ),
    ("vllm:request_params_n", "The n parameter of requests.", lambda c: c.n, N),
)
