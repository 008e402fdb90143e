"""GET /metrics, read with Prometheus's own parser."""

from typing import Any

import msgspec
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from pipeline.metrics import exposition
from pipeline.metrics.batch_size_buckets import BATCH_SIZE_BUCKETS, bucket_of
from pipeline.metrics.stats import (
    EdgeCounts,
    ExecuteCounts,
    KeyUsage,
    KVGroupCounts,
    OwnCounts,
    ScheduleCounts,
    ServerStats,
    SpeculationCounts,
    StageCounts,
    StageStats,
    StateSlotCounts,
    num_queued,
)
from pipeline.runtime.messages import Finish
from pipeline.stages.gateway.admission.admission import Admission
from pipeline.stages.gateway.metrics import GatewayMetrics
from pipeline.stages.schedule.stats.metrics import ScheduleMetrics

MODEL = 'odd "name" \\ with\nlines'


def stage(name: str, own: OwnCounts | None, state: str = "ready", age_s: float = 0.0) -> StageStats:
    counts = StageCounts(9, 1, [EdgeCounts("x.0", 3, 2)], own, num_queued(own), 1.5, 7, 64, 32) if own else None
    return StageStats(name, 77, state, 0, 10.0, 4096, 2.5, 3, counts, age_s)


def schedule(**more: Any) -> ScheduleCounts:
    counting = ScheduleMetrics()
    counting.step_tokens.observe(20)
    counting.observe_step(3, 3, wait_s=0.0003, step_s=0.004)
    empty = counting.queue_s.counts()
    totals: dict[str, Any] = {
        "num_prompt_tokens": 100,
        "num_cached_tokens": 30,
        "num_output_tokens": 50,
        "num_preemptions": 2,
    } | more
    return ScheduleCounts(
        num_running=3,
        num_waiting=4,
        num_blocks_free=2,
        num_blocks_cached=3,
        num_blocks_held=5,
        num_blocks_total=10,
        num_steps=1,
        queue_s=empty,
        prefill_s=empty,
        decode_s=empty,
        inference_s=empty,
        step_tokens=counting.step_tokens.counts(),
        plan_s=0.5,
        settle_s=0.25,
        depth=2,
        plan_wait_s=counting.plan_wait_s(),
        gaps=counting.gaps(),
        **totals,
    )


def gateway(num_stopped: int, first_s: float) -> Any:
    counting = GatewayMetrics()
    for _ in range(num_stopped):
        counting.opened(1, 1, 16)
        counting.first_s.observe(first_s)
        counting.finished(Finish.STOP, 1.0, 0.5, 6)
        counting.prompt(10)
    counting.pooled("score")
    counting.prompt(7, "score")
    counting.prompt(8, "score")
    admission = Admission(16, 1000, 5000)
    admission.take(2, 300, 0.0, 70)
    admission.num_preempted = counting.num_preemptions = 2
    counting.num_timed_out = 3
    counting.num_overloaded, counting.num_overloaded_by_size = 5, 2
    return counting.counts(2, admission)


def server(*stages: StageStats) -> ServerStats:
    return ServerStats(
        "1-ab",
        1,
        "0.1",
        MODEL,
        "http://x",
        "serving",
        5.0,
        6.0,
        list(stages),
        10,
        16,
        2048,
        "q4_1",
        "int8",
        backend="kernels=avx2",
    )


def read(stats: ServerStats) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Samples by name and labels, without the two of vLLM's labels that all have."""
    text = exposition.text_of(stats).decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = frozenset((k, v) for k, v in sample.labels.items() if k not in ("model_name", "engine"))
            assert (sample.name, labels) not in found, "duplicate sample"
            found[sample.name, labels] = sample.value
    return found


def value(samples: Any, name: str, **labels: str) -> float:
    found: float = samples[name, frozenset(labels.items())]
    return found


def test_the_cache_s_configuration_has_its_type() -> None:
    labels = {"block_size": "16", "cache_dtype": "int8", "num_gpu_blocks": "10", "num_cpu_blocks": "0"}
    assert read(server(stage("schedule", schedule())))["vllm:cache_config_info", frozenset(labels.items())] == 1


def test_the_server_s_info_has_its_quantization() -> None:
    labels = {"version": "0.1", "server": "1-ab", "state": "serving", "quantization": "q4_1"}
    labels["backend"] = "kernels=avx2"
    assert value(read(server()), "pipeline_server_info", **labels) == 1


def test_scheduler_metrics_have_vllm_s_names_and_meanings() -> None:
    samples = read(server(stage("schedule.0", schedule())))
    for reason, num in (("capacity", 4), ("deferred", 0)):
        assert value(samples, "vllm:num_requests_waiting_by_reason", reason=reason) == num
    expected = {
        "vllm:num_requests_running": 3,
        "vllm:num_requests_waiting": 4,
        "vllm:num_requests_swapped": 0,
        "vllm:cpu_cache_usage_perc": 0,
        "vllm:kv_cache_usage_perc": 0.5,
        "vllm:prompt_tokens_total": 100,
        "vllm:prefix_cache_queries_total": 100,
        "vllm:prefix_cache_hits_total": 30,
        "vllm:generation_tokens_total": 50,
        "vllm:num_preemptions_total": 2,
        "vllm:iteration_tokens_total_count": 1,
        "vllm:iteration_tokens_total_sum": 20,
    }
    assert {name: value(samples, name) for name in expected} == expected
    assert value(samples, "vllm:prompt_tokens_by_source_total", source="local_compute") == 70
    assert value(samples, "vllm:iteration_tokens_total_bucket", le="16.0") == 0
    assert value(samples, "vllm:iteration_tokens_total_bucket", le="32.0") == 1
    assert value(samples, "vllm:iteration_tokens_total_bucket", le="+Inf") == 1


def test_speculation_has_vllm_s_metrics_only_if_it_is_on() -> None:
    counts = SpeculationCounts(3, 12, 7, [3, 2, 2, 0])
    samples = read(server(stage("schedule.0", msgspec.structs.replace(schedule(), speculation=counts))))
    name = "vllm:spec_decode_num"
    assert value(samples, f"{name}_drafts_total") == 3
    assert value(samples, f"{name}_draft_tokens_total") == 12
    assert value(samples, f"{name}_accepted_tokens_total") == 7
    by_position = [value(samples, f"{name}_accepted_tokens_per_pos_total", position=str(i)) for i in range(4)]
    assert by_position == [3, 2, 2, 0]
    off = read(server(stage("schedule.0", schedule())))
    assert not any(name.startswith("vllm:spec_decode") for name, _ in off)


def test_slots_for_states_have_metrics_only_if_the_model_has_any() -> None:
    counts = StateSlotCounts(*range(1, len(StateSlotCounts.__struct_fields__) + 1))
    samples = read(server(stage("schedule.0", msgspec.structs.replace(schedule(), states=counts))))
    by_state = [value(samples, "pipeline_state_slots", stage="schedule.0", state=s) for s in ("free", "cached", "held")]
    assert by_state == [1, 2, 3]
    assert value(samples, "pipeline_state_swap_slots", stage="schedule.0", state="held") == 6 - 5
    names = ["hits", "snapshots", "evictions", "restored", "swapped_out", "offloaded", "lost_tokens"]
    totals = [value(samples, f"pipeline_state_{name}_total", stage="schedule.0") for name in names]
    assert totals == [7, 8, 9, 10, 11, 12, 13]
    off = read(server(stage("schedule.0", schedule())))
    assert not any(name.startswith("pipeline_state_") for name, _ in off)


def test_plan_waits_and_steps_in_flight_are_exported() -> None:
    samples = read(server(stage("schedule.0", schedule())))
    name = "pipeline_schedule_plan_wait_seconds"
    assert value(samples, f"{name}_bucket", stage="schedule.0", le="0.0002") == 0
    assert value(samples, f"{name}_bucket", stage="schedule.0", le="0.0005") == 1
    assert value(samples, f"{name}_count", stage="schedule.0") == 1
    assert value(samples, f"{name}_sum", stage="schedule.0") == 0.0003
    assert value(samples, "pipeline_schedule_depth", stage="schedule.0") == 2


def test_step_gaps_are_exported_by_batch_size() -> None:
    counting = ScheduleMetrics()
    for num_rows, num_tokens, wait_s in ((1, 1, 2e-6), (200, 200, 0.0), (256, 256, 3e-5), (3, 90, 0.5)):
        counting.observe_step(num_rows, num_tokens, wait_s, step_s=0.01)
    counts = msgspec.structs.replace(schedule(), gaps=counting.gaps(), plan_wait_s=counting.plan_wait_s())
    samples = read(server(stage("schedule.0", counts)))
    expected = {"1": (1, 2e-6, 0.01), "65-256": (2, 3e-5, 0.02), "prompts": (1, 0.5, 0.01)}
    for batch, (num, gap_s, busy_s) in expected.items():
        labels = {"stage": "schedule.0", "batch": batch}
        assert value(samples, "pipeline_step_gap_seconds_count", **labels) == num
        assert value(samples, "pipeline_step_gap_seconds_sum", **labels) == pytest.approx(gap_s)
        assert value(samples, "pipeline_step_busy_seconds_total", **labels) == pytest.approx(busy_s)
    assert value(samples, "pipeline_step_gap_seconds_bucket", stage="schedule.0", batch="65-256", le="1e-05") == 1
    assert value(samples, "pipeline_schedule_plan_wait_seconds_count", stage="schedule.0") == 4
    batches = {labels for name, labels in samples if name == "pipeline_step_gap_seconds_count"}
    assert len(batches) == 3, "batch sizes without steps are omitted"


def test_each_number_of_rows_has_its_bucket() -> None:
    for num_rows in (1, 2, 4, 5, 16, 17, 64, 65, 256, 257, 1024, 1025, 4096):
        first, _, last = BATCH_SIZE_BUCKETS[bucket_of(num_rows, num_rows)].partition("-")
        assert int(first) <= num_rows <= int(last or first)
    assert BATCH_SIZE_BUCKETS[bucket_of(0, 64)] == BATCH_SIZE_BUCKETS[bucket_of(4, 5)] == "prompts"


def test_swapping_and_forks_are_counted() -> None:
    swapping = {"num_swapped": 2, "num_swap_blocks_free": 6, "num_swap_blocks_total": 8}
    since_start = {"num_blocks_swapped_out": 12, "num_blocks_swapped_in": 10, "num_forks": 5}
    since_start |= {"num_blocks_offloaded": 30, "num_blocks_restored": 20}
    samples = read(server(stage("schedule.0", schedule(**swapping, **since_start))))
    assert value(samples, "vllm:num_requests_swapped") == 2
    assert value(samples, "vllm:cpu_cache_usage_perc") == 0.25
    assert value(samples, "pipeline_swap_blocks", stage="schedule.0", state="free") == 6
    assert value(samples, "pipeline_swap_blocks", stage="schedule.0", state="held") == 2
    assert value(samples, "pipeline_schedule_blocks_swapped_out_total", stage="schedule.0") == 12
    assert value(samples, "pipeline_schedule_blocks_swapped_in_total", stage="schedule.0") == 10
    assert value(samples, "pipeline_schedule_forks_total", stage="schedule.0") == 5
    assert value(samples, "pipeline_schedule_blocks_offloaded_total", stage="schedule.0") == 30
    assert value(samples, "pipeline_schedule_blocks_restored_total", stage="schedule.0") == 20


def test_blocks_are_counted_by_kv_group() -> None:
    groups = [KVGroupCounts(0, 40), KVGroupCounts(512, 33), KVGroupCounts(512, 32)]
    samples = read(server(stage("schedule.0", msgspec.structs.replace(schedule(), kv_groups=groups))))
    for index, group in enumerate(groups):
        labels = {"stage": "schedule.0", "group": str(index), "window": str(group.window)}
        assert value(samples, "pipeline_kv_group_blocks", **labels) == group.num_blocks


def test_open_tokens_are_shown_with_their_limit() -> None:
    samples = read(server(stage("gateway.0", gateway(3, 0.03)), stage("gateway.1", gateway(4, 3.0))))
    assert value(samples, "pipeline_open_tokens") == 600
    assert value(samples, "pipeline_max_open_tokens") == 2000
    for prefix in ("pipeline_requests", "pipeline_calls"):  # the old name stays for one release
        assert value(samples, f"{prefix}_timed_out_total") == 6
        assert value(samples, f"{prefix}_overloaded_total") == 10
    for reason, num in (("max_num_queued_reqs", 6), ("max_num_queued_tokens", 4)):
        assert value(samples, "vllm:admission_rejections_total", reason=reason) == num


def test_open_bytes_are_shown_with_their_limit() -> None:
    samples = read(server(stage("gateway.0", gateway(3, 0.03)), stage("gateway.1", gateway(4, 3.0))))
    assert value(samples, "pipeline_open_bytes") == 140
    assert value(samples, "pipeline_max_open_bytes") == 10000
    assert value(samples, "pipeline_requests_preempted") == 4
    assert value(samples, "pipeline_request_preemptions_total") == 4


def test_gateways_are_summed() -> None:
    samples = read(server(stage("gateway.0", gateway(3, 0.03)), stage("gateway.1", gateway(4, 3.0))))
    assert value(samples, "vllm:request_success_total", finished_reason="stop") == 7
    assert value(samples, "vllm:request_success_total", finished_reason="error") == 0
    assert value(samples, "vllm:time_to_first_token_seconds_count") == 7
    assert value(samples, "vllm:time_to_first_token_seconds_sum") == pytest.approx(3 * 0.03 + 4 * 3.0)
    assert value(samples, "vllm:time_to_first_token_seconds_bucket", le="0.04") == 3
    assert value(samples, "vllm:time_to_first_token_seconds_bucket", le="2.5") == 3
    assert value(samples, "vllm:time_to_first_token_seconds_bucket", le="5.0") == 7
    assert value(samples, "vllm:request_generation_tokens_sum") == 42
    assert value(samples, "vllm:request_time_per_output_token_seconds_sum") == pytest.approx(7 * 0.1)
    assert value(samples, "pipeline_open_requests") == 4


def test_a_late_stage_shows_its_last_counts_and_their_age() -> None:
    samples = read(server(stage("schedule.0", schedule(), "late", 12.5), stage("execute.0", None, "starting")))
    assert value(samples, "pipeline_stage_state", stage="schedule.0", state="late") == 1
    assert value(samples, "pipeline_stage_state", stage="schedule.0", state="ready") == 0
    assert value(samples, "pipeline_stage_counts_age_seconds", stage="schedule.0") == 12.5
    assert value(samples, "vllm:generation_tokens_total") == 50
    assert value(samples, "pipeline_stage_resident_memory_bytes", stage="execute.0") == 4096
    assert ("pipeline_stage_queue", frozenset({("stage", "execute.0")})) not in samples


def test_every_stage_has_process_queue_and_edge_metrics() -> None:
    samples = read(server(stage("schedule.0", schedule())))
    expected = {
        "pipeline_stage_cpu_seconds_total": 2.5,
        "pipeline_stage_restarts_total": 0,
        "pipeline_stage_queue": 4,
        "pipeline_stage_wait_seconds_total": 1.5,
        "pipeline_stage_messages_received_total": 9,
        "pipeline_stage_messages_stale_total": 1,
        "pipeline_stage_arena_used_bytes": 32,
    }
    assert {name: value(samples, name, stage="schedule.0") for name in expected} == expected
    assert value(samples, "pipeline_edge_messages_sent_total", stage="schedule.0", to="x.0") == 3
    assert value(samples, "pipeline_edge_messages_refused_total", stage="schedule.0", to="x.0") == 2


def test_an_unusual_model_name_is_escaped() -> None:
    families = text_string_to_metric_families(exposition.text_of(server(stage("schedule.0", schedule()))).decode())
    running = next(family for family in families if family.name == "vllm:num_requests_running")
    assert running.samples[0].labels == {"model_name": MODEL, "engine": "0"}


def test_the_output_equals_that_of_prometheus_client() -> None:
    stats = server(stage("schedule.0", schedule()), stage("gateway.0", gateway(3, 0.03)))

    class All(Collector):
        def collect(self) -> Any:
            return exposition.families_of(stats)

    def read_all(text: bytes) -> Any:
        return [
            (family.name, family.type, family.documentation, [(s.name, s.labels, s.value) for s in family.samples])
            for family in text_string_to_metric_families(text.decode())
        ]

    assert read_all(exposition.text_of(stats)) == read_all(generate_latest(All()))


def test_a_server_without_counts_can_be_scraped() -> None:
    samples = read(server())
    assert value(samples, "vllm:e2e_request_latency_seconds_count") == 0
    assert ("vllm:num_requests_running", frozenset()) not in samples, "unknown is not zero"


def test_requests_with_nan_logits_are_counted() -> None:
    answering, other = ExecuteCounts(1, 9, 90, 1.5, 0.5, num_nan=3), ExecuteCounts(1, 9, 90, 1.5, 0.5)
    samples = read(server(stage("execute.0", answering), stage("execute.1", other)))
    assert value(samples, "vllm:corrupted_requests_total") == 3


def test_each_rank_reports_how_long_it_waits_for_others() -> None:
    ranks = [
        stage(f"execute.{rank}", ExecuteCounts(1, 9, 90, 1.5, 0.5, barrier_s=0.25 * rank, pipeline_wait_s=rank / 8))
        for rank in range(2)
    ]
    samples = read(server(*ranks))
    for rank in range(2):
        assert value(samples, "pipeline_execute_barrier_seconds_total", stage=f"execute.{rank}") == 0.25 * rank
        assert value(samples, "pipeline_execute_pipeline_wait_seconds_total", stage=f"execute.{rank}") == rank / 8


def test_each_api_key_has_its_counters() -> None:
    usage = [KeyUsage("alice", 5, 100, 40, 60, 1, 2, 3), KeyUsage("key-1")]
    stats = ServerStats("77-ab", 77, "1", MODEL, "", "serving", 1.0, 2.0, [], keys=usage)
    found = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(exposition.text_of(stats).decode())
        for sample in family.samples
        if sample.name.startswith("pipeline_key_")
    }
    assert {name: value for name, value in found.items() if ("key", "alice") in name} == {
        ("pipeline_key_requests_total", ("key", "alice")): 5,
        ("pipeline_key_prompt_tokens_total", ("key", "alice")): 100,
        ("pipeline_key_cached_tokens_total", ("key", "alice")): 40,
        ("pipeline_key_output_tokens_total", ("key", "alice")): 60,
        ("pipeline_key_rejected_total", ("key", "alice"), ("reason", "rate_limit")): 1,
        ("pipeline_key_rejected_total", ("key", "alice"), ("reason", "overloaded")): 2,
        ("pipeline_key_rejected_total", ("key", "alice"), ("reason", "invalid")): 3,
    }
    assert len(found) == 14, "a key that was not used yet has counters of 0"
    without = exposition.text_of(msgspec.structs.replace(stats, keys=[]))
    assert b"pipeline_key_" not in without


def test_requests_of_poolers_count_by_task_at_all_gateways() -> None:
    samples = read(server(stage("gateway.0", gateway(0, 0.1)), stage("gateway.1", gateway(0, 0.1))))
    for what, value in (("requests", 2), ("inputs", 4), ("tokens", 30)):
        assert samples[f"pipeline_pooling_{what}_total", frozenset({("task", "score")})] == value


def test_several_models_have_each_family_once_and_their_names() -> None:
    one, other = (msgspec.structs.replace(server(), model=name) for name in ("chat", "vectors"))
    states = {"chat": "loaded", "vectors": "loaded", "coder": "unloaded"}
    text = exposition.text_of_models([one, other], states, {"chat": 3, "vectors": 0, "coder": 0}).decode()
    families = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(families) == len(set(families))
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    assert len(samples) == len({line.rpartition(" ")[0] for line in samples}), "each series is there once"
    assert 'pipeline_model_state{model_name="coder",state="unloaded"} 1' in samples
    assert 'pipeline_model_turns_total{model_name="chat"} 3' in "".join(samples).replace(".0", "")
    for name in ("chat", "vectors"):
        assert any(f'model_name="{name}"' in line and line.startswith("pipeline_uptime") for line in samples)
