"""Every settings key has a test of its effect, which sets another value than the default."""

import ast
from functools import cache
from pathlib import Path

import msgspec
from msgspec import inspect

from pipeline.config.keys import Key, sections

ROOT = Path(__file__).resolve().parents[2]

GATEWAY = "tests/stages/gateway/test_settings.py"
CAPPED = f"{GATEWAY}::test_limits_on_request_fields_are_enforced"
GRAMMARS = "tests/stages/ingest/test_reply_grammar.py"
INGEST = "tests/stages/ingest/test_settings.py"
SCHEDULE = "tests/stages/schedule/test_settings.py"
SERVER = "tests/e2e/start/test_settings.py"
AUTH = "tests/e2e/http/access/test_auth.py"
ACCESS_LOG = "tests/stages/gateway/http/access/test_access_log.py"
LIFE = "tests/e2e/recovery/test_life_and_death.py"
REPLICAS = "tests/e2e/hosts/test_replicas.py::test_replicas_return_the_same_texts_as_one_of_each"
JSON_LOGS = "tests/e2e/test_observability.py::test_json_logs_parse_and_have_the_request_id"
STREAMS = "tests/stages/gateway/http/test_streams.py"
CORS = "tests/stages/gateway/http/access/test_cors.py"
STORED = "tests/stages/gateway/apis/responses/test_stored.py"
RUNNER = "tests/stages/execute/test_runner.py"
SPECULATION = "tests/stages/execute/drafts/test_speculation.py"
LORA = "tests/e2e/models/test_lora.py"
BACKEND = "tests/stages/execute/cpu/test_backend.py"
SLEEP = "tests/e2e/recovery/test_sleep.py"
RANKS = "tests/e2e/hosts/test_ranks.py"
SEVERAL = "tests/e2e/several/test_several_models.py"
LOADING = "tests/e2e/several/test_loading.py"
CUDA_RANKS = "tests/stages/execute/cuda/test_ranks.py"

EFFECTS = {
    "model": (
        "tests/e2e/models/test_hub_model.py::test_a_hub_id_is_served_under_its_name_with_the_output_of_transformers"
    ),
    "served_model_name": f"{GATEWAY}::test_served_model_name_is_the_model_of_requests",
    "max_model_len": f"{RUNNER}::test_the_longest_sequence_is_the_smallest_of_the_limits",
    "quantization": (
        "tests/stages/execute/models/test_smollm2.py::test_the_cpu_kernels_find_the_same_largest_logit_as_float32"
    ),
    "generation_config": (
        "tests/stages/gateway/test_sampling_defaults.py::test_generation_config_turns_the_defaults_off"
    ),
    "hf_overrides": "tests/stages/prepare/sources/test_forms.py::test_keys_of_the_config_may_be_overridden",
    "chat_template": (
        "tests/stages/prepare/tokenizers/test_chat_templates.py::test_a_given_template_replaces_those_of_the_model"
    ),
    "cache_dir": "tests/stages/prepare/cache/test_cache.py::test_the_root_is_the_setting_or_the_users_cache_folder",
    "keys": "tests/stages/gateway/http/access/test_key_limits.py::test_zeromq_has_the_same_limits_and_models",
    "aliases": f"{SEVERAL}::test_every_api_chooses_by_model",
    "memory_bytes": f"{LOADING}::test_models_that_fit_are_loaded_at_the_start_in_order_and_the_log_says_why_not",
    "swap_quantum_s": (
        "tests/e2e/several/test_turns.py::test_models_that_do_not_fit_together_take_turns_and_no_stream_notices"
    ),
    "pinned": f"{LOADING}::test_a_request_loads_its_model_and_the_idle_one_leaves_for_it",
    "load_at_start": f"{LOADING}::test_models_are_loaded_when_they_are_wanted_and_leave_when_they_are_not",
    "idle_unload_s": f"{LOADING}::test_models_are_loaded_when_they_are_wanted_and_leave_when_they_are_not",
    "log_level": JSON_LOGS,
    "log_format": JSON_LOGS,
    "access_log.file": f"{ACCESS_LOG}::test_a_line_has_who_what_tokens_and_times",
    "access_log.format": f"{ACCESS_LOG}::test_the_settings_choose_form_and_rotation",
    "access_log.max_bytes": f"{ACCESS_LOG}::test_the_settings_choose_form_and_rotation",
    "access_log.max_files": f"{ACCESS_LOG}::test_the_settings_choose_form_and_rotation",
    "gateway.replicas": REPLICAS,
    "gateway.host": f"{AUTH}::test_it_listens_beyond_this_machine_with_keys_or_allow_unauthenticated",
    "gateway.port": f"{LIFE}::test_a_port_in_use_is_reported_before_anything_starts",
    "gateway.zmq": "tests/stages/gateway/http/access/test_guard.py::test_zmq_over_tcp_requires_a_key",
    "gateway.max_open_sequences": (f"{GATEWAY}::test_a_request_above_max_open_sequences_is_a_client_error"),
    "gateway.max_open_tokens": (
        "tests/stages/gateway/admission/test_admission.py::"
        "TestGateway::test_the_prompts_real_length_replaces_the_estimate"
    ),
    "gateway.max_open_bytes": (
        "tests/stages/gateway/admission/test_preemption.py::test_new_requests_get_503_while_the_limit_is_reached"
    ),
    "gateway.max_open_media_bytes": (
        "tests/stages/gateway/admission/test_media_admission.py::test_images_that_wait_have_a_limit_by_name"
    ),
    "gateway.request_timeout_s": (
        "tests/stages/gateway/admission/test_deadlines.py::TestDeadlineSource::test_the_servers_deadline_is_the_default"
    ),
    "gateway.max_body_bytes": (
        "tests/stages/gateway/http/test_app_errors.py::TestTooLargeBody::test_a_too_large_body_is_413_before_it_is_read"
    ),
    "gateway.max_media_body_bytes": (
        "tests/stages/gateway/http/uploads/test_photos.py::test_photos_have_a_limit_of_their_own"
    ),
    "gateway.max_stored_responses": f"{STORED}::test_max_stored_responses_bounds_the_store",
    "gateway.max_stored_response_bytes": f"{STORED}::test_max_stored_response_bytes_bounds_the_store",
    "gateway.slow_client_timeout_s": f"{STREAMS}::TestSlowReader::test_a_client_that_reads_nothing_is_disconnected",
    "gateway.late_stage_timeout_s": (
        "tests/stages/gateway/recovery/test_late_stages.py::"
        "test_requests_wait_for_a_stage_that_is_late_for_less_than_late_stage_timeout_s"
    ),
    "gateway.sse_keep_alive_s": (
        "tests/stages/gateway/http/uploads/test_keep_alive.py::test_sse_keep_alive_s_of_0_writes_nothing"
    ),
    "gateway.per_request_metrics": (
        "tests/stages/gateway/replies/test_vllm_fields.py::TestMetrics::test_the_times_of_a_request_are_in_its_reply"
    ),
    "gateway.otlp_traces_endpoint": (
        "tests/stages/gateway/otel/test_traces.py::test_a_collector_gets_the_spans_of_requests"
    ),
    "gateway.api_keys_file": f"{AUTH}::test_openai_s_client_is_accepted_only_with_a_key",
    "gateway.allow_unauthenticated": f"{AUTH}::test_it_listens_beyond_this_machine_with_keys_or_allow_unauthenticated",
    "gateway.allowed_hosts": (
        "tests/stages/gateway/http/access/test_origins.py::TestHosts::test_a_listed_host_is_allowed"
    ),
    "gateway.allowed_origins": (
        "tests/stages/gateway/http/access/test_origins.py::TestOrigins::test_a_listed_origin_is_allowed"
    ),
    "gateway.allowed_methods": f"{CORS}::test_allowed_methods_and_allowed_headers_limit_preflights",
    "gateway.allowed_headers": f"{CORS}::test_allowed_methods_and_allowed_headers_limit_preflights",
    "gateway.allow_credentials": (
        f"{CORS}::test_allow_credentials_names_the_origin_since_browsers_do_not_accept_the_wildcard"
    ),
    "gateway.ssl_certfile": (
        "tests/stages/gateway/http/access/test_tls.py::test_whole_replies_and_streams_arrive_over_tls"
    ),
    "gateway.ssl_keyfile": (
        "tests/stages/gateway/http/access/test_tls.py::test_whole_replies_and_streams_arrive_over_tls"
    ),
    "gateway.ssl_ca_certs": (
        "tests/stages/gateway/http/access/test_tls.py::test_ssl_ca_certs_requires_a_client_certificate"
    ),
    "gateway.share_prefix_cache": (
        "tests/stages/gateway/test_scopes.py::TestPrefixCache::test_the_prefix_cache_can_be_shared"
    ),
    "gateway.page": "tests/stages/gateway/page/test_files.py::test_the_page_can_be_turned_off",
    "gateway.enable_sleep_mode": f"{SLEEP}::test_a_server_must_be_allowed_to_sleep",
    "gateway.admin_host": f"{SERVER}::test_the_admin_listener_s_address_and_the_sizes_of_arenas_are_set",
    "gateway.admin_port": f"{AUTH}::test_the_admin_listener_answers_for_the_whole_server",
    "ingest.replicas": REPLICAS,
    "ingest.arena_bytes": "tests/stages/ingest/test_stage.py::test_a_full_arena_sends_ids_inline",
    "speculative.method": f"{SPECULATION}::test_settings_choose_the_proposer",
    "speculative.draft": "tests/stages/prepare/drafts/test_draft.py::test_a_draft_model_is_linked_for_the_executor",
    "speculative.num_speculative_tokens": f"{SPECULATION}::test_settings_choose_the_proposer",
    "speculative.prompt_lookup_min": f"{SPECULATION}::test_settings_choose_the_proposer",
    "speculative.prompt_lookup_max": f"{SPECULATION}::test_settings_choose_the_proposer",
    "speculative.adaptive": f"{SCHEDULE}::test_every_limit_comes_from_the_settings",
    "lora.adapters": f"{LORA}::test_adapters_of_the_settings_are_served_by_name",
    "lora.runtime_loading": "tests/stages/gateway/adapters/test_adapters.py::test_loading_needs_the_setting",
    "lora.max_loras": f"{SCHEDULE}::test_every_limit_comes_from_the_settings",
    "lora.max_lora_rank": "tests/lora/test_convert.py::test_the_rank_is_limited",
    "lora.max_adapter_bytes": "tests/stages/gateway/adapters/test_hostile_adapters.py::test_large_files_are_refused",
    "lora.allowed_folders": "tests/stages/gateway/adapters/test_hostile_adapters.py::test_only_allowed_folders",
    "lora.max_cpu_loras": "tests/stages/execute/adapters/test_lora.py::test_more_adapters_than_slots_take_turns",
    "schedule.max_num_seqs": f"{SCHEDULE}::test_max_num_seqs_limits_running_sequences",
    "schedule.max_num_batched_tokens": f"{SCHEDULE}::test_max_num_batched_tokens_limits_a_step",
    "schedule.max_num_prefill_tokens": f"{SCHEDULE}::test_max_num_prefill_tokens_limits_a_step_in_which_none_decodes",
    "schedule.prefix_caching": f"{SCHEDULE}::test_prefix_caching_can_be_turned_off",
    "schedule.max_steps_in_flight": (
        "tests/stages/schedule/test_depths.py::test_at_greater_depths_later_steps_are_sent_before_the_first_result"
    ),
    "schedule.policy": f"{SCHEDULE}::test_policy_sets_the_order",
    "schedule.kv_offload": f"{SCHEDULE}::test_kv_offload_copies_full_blocks_to_swap_space",
    "schedule.preemption": f"{SCHEDULE}::test_preemption_copies_blocks_or_recomputes_them",
    "schedule.max_step_ms": f"{SCHEDULE}::test_max_step_ms_limits_chunks_next_to_a_decoding_sequence",
    "schedule.prompt_max_slowdown": f"{SCHEDULE}::test_prompts_slow_down_a_step_by_at_most_the_limit",
    "schedule.long_prompt_tokens": f"{SCHEDULE}::test_long_prompt_tokens_sets_which_prompts_are_long",
    "schedule.encode_max_slowdown": (
        "tests/stages/schedule/media/test_spans.py::test_images_slow_down_streams_by_the_limit"
    ),
    "schedule.long_prompt_max_slowdown": f"{SCHEDULE}::test_prompts_slow_down_a_step_by_at_most_the_limit",
    "schedule.arena_bytes": f"{SCHEDULE}::test_arena_bytes_limits_prompts_in_shared_memory",
    "execute.device": "tests/stages/schedule/test_depths.py::test_on_a_gpu_the_default_depth_is_2",
    "execute.activations": (
        "tests/stages/execute/cpu/test_activations.py::test_int12_is_nearer_to_the_weights_than_int8"
    ),
    "execute.dtype": f"{BACKEND}::test_float32_uses_torch_without_a_warning",
    "execute.keep_packed_weights": (
        "tests/stages/execute/cpu/test_panel_file.py::test_without_the_setting_no_file_is_written_or_read"
    ),
    "execute.kv_dtype": "tests/stages/execute/kv/test_kv_int8.py::"
    "test_kv_dtype_int8_takes_little_more_than_half_the_memory",
    "execute.hybrid_kv_cache_manager": (
        "tests/stages/execute/kv/test_kv.py::test_layers_are_divided_only_with_the_setting"
    ),
    "execute.kernels": f"{BACKEND}::test_an_instruction_set_that_this_cpu_lacks_is_rejected",
    "execute.kv_cache_bytes": f"{RUNNER}::test_kv_memory_limits_the_longest_sequence_and_the_error_names_the_key",
    "execute.programmatic_dependent_launch": (
        "tests/stages/execute/cuda/test_settings.py::test_early_launch_reaches_the_model"
    ),
    "execute.gpu_memory_utilization": (
        "tests/stages/execute/cuda/models/test_kv.py::test_the_fraction_limits_all_memory_of_this_process"
    ),
    "execute.swap_bytes": "tests/supervisor/test_supervisor.py::test_swap_space_belongs_to_the_executor_and_is_freed",
    "execute.swap_dir": f"{SLEEP}::test_a_file_in_a_folder_holds_what_was_saved",
    "execute.sleep_cache_bytes": f"{SLEEP}::test_the_prefix_cache_of_a_sleeping_server_stays",
    "execute.tensor_parallel": f"{RANKS}::test_two_ranks_return_what_one_process_returns",
    "execute.pipeline_parallel": (
        "tests/stages/execute/ranks/test_pipeline_scheduled.py::test_texts_and_records_are_those_of_one_process"
    ),
    "execute.pipeline_layers": (
        "tests/stages/execute/ranks/test_pipeline_scheduled.py::test_texts_and_records_are_those_of_one_process"
    ),
    "execute.cores": "tests/stages/execute/cpu/test_cores.py::test_each_rank_runs_on_its_cores",
    "execute.launcher": "tests/e2e/hosts/test_hosts.py::test_a_remote_executor_is_listed_with_its_host",
    "ray.address": "tests/e2e/hosts/test_ray.py::test_an_executor_that_fits_nowhere_is_refused_by_what_the_nodes_have",
    "ray.bundle_cpus": "tests/hosts/test_placement.py::test_ranks_need_a_gpu_each_or_a_cpu_each",
    "ray.placement_timeout_s": (
        "tests/e2e/hosts/test_ray.py::test_an_executor_that_fits_nowhere_is_refused_by_what_the_nodes_have"
    ),
    "transport.host": "tests/hosts/test_hosts.py::test_processes_of_this_host_listen_where_the_settings_say",
    "transport.ports": "tests/hosts/test_hosts.py::test_processes_of_this_host_listen_where_the_settings_say",
    "transport.host_timeout_s": "tests/hosts/test_hosts.py::test_a_silent_host_is_lost_and_another_one_is_found",
    "execute.all_reduce": f"{CUDA_RANKS}::test_two_processes_exchange_sums_in_symmetric_memory",
    "execute.barrier_timeout_s": f"{RANKS}::test_a_rank_that_stands_still_is_named_and_all_ranks_are_replaced",
    "execute.num_threads": f"{BACKEND}::test_threads_end_with_the_program_and_closing_twice_is_harmless",
    "execute.encoder_cache_bytes": (
        "tests/stages/execute/vision/test_encodes.py::test_the_number_of_rows_is_that_of_the_setting"
    ),
    "execute.arena_bytes": f"{SERVER}::test_the_admin_listener_s_address_and_the_sizes_of_arenas_are_set",
    "detokenize.replicas": REPLICAS,
    "supervisor.start_timeout_s": f"{SERVER}::test_start_timeout_s_limits_the_start",
    "supervisor.prepare_timeout_s": (
        "tests/stages/prepare/sources/test_wheel.py::test_fetching_has_a_deadline_and_leaves_no_process"
    ),
    "supervisor.drain_timeout_s": f"{LIFE}::test_streams_that_outlast_the_drain_end_with_a_clear_error",
    "supervisor.stop_timeout_s": f"{SERVER}::test_stop_timeout_s_limits_the_stop_of_a_stage_that_hangs",
    "supervisor.max_restarts": (
        f"{LIFE}::test_without_restarts_a_killed_stage_is_named_in_the_log_and_to_clients_and_the_server_ends"
    ),
    "supervisor.hang_timeout_s": f"{LIFE}::test_each_stage_that_is_stopped_is_killed_and_requests_go_on",
    "supervisor.health_timeout_s": f"{SERVER}::test_health_timeout_s_limits_a_stage_s_answer",
    "supervisor.crash_reports": (
        "tests/supervisor/crashes/test_crash_reports.py::"
        "test_crash_reports_can_be_off_and_a_stage_that_says_why_it_cannot_start_has_none"
    ),
    "supervisor.crash_recording_bytes": (
        "tests/runtime/process/test_black_box.py::test_crash_recording_bytes_of_0_makes_no_recording"
    ),
    "supervisor.record_first_processes": (
        "tests/runtime/process/test_black_box.py::test_record_first_processes_off_records_only_successors"
    ),
    "limits.max_n": CAPPED,
    "limits.max_best_of": CAPPED,
    "limits.max_logprobs": CAPPED,
    "limits.max_stop_strings": CAPPED,
    "limits.max_stop_token_ids": CAPPED,
    "limits.max_logit_bias": CAPPED,
    "limits.max_bad_words": CAPPED,
    "limits.max_tools": CAPPED,
    "gateway.allowed_media_domains": (
        "tests/stages/gateway/media/test_fetched_requests.py::test_an_image_of_a_url_is_fetched"
    ),
    "limits.max_images": "tests/stages/gateway/parsing/test_images.py::test_max_images_bounds_a_request",
    "limits.max_prompt_bytes": CAPPED,
    "limits.max_grammar_bytes": f"{GATEWAY}::test_max_grammar_bytes_bounds_a_schema",
    "limits.max_json_depth": f"{GATEWAY}::test_max_json_depth_bounds_a_body",
    "limits.max_header_bytes": f"{GATEWAY}::test_max_header_bytes_bounds_headers_and_urls",
    "limits.template_timeout_s": f"{INGEST}::test_template_timeout_s_limits_a_template",
    "limits.grammar_timeout_s": f"{INGEST}::test_grammar_timeout_s_limits_the_check_of_a_grammar",
    "limits.max_prompt_logprobs": f"{GATEWAY}::test_max_prompt_logprobs_bounds_one_reply",
    "chat.tool_call_parser": f"{GATEWAY}::test_tool_call_parser_selects_the_format_of_calls",
    "chat.allow_special_tokens_in_content": (
        "tests/stages/ingest/prompts/test_content_specials.py::"
        "test_allow_special_tokens_in_content_encodes_them_as_such"
    ),
    "chat.reasoning_budget": f"{GRAMMARS}::test_the_servers_budget",
    "chat.reasoning_budget_message": f"{GRAMMARS}::test_the_servers_budget",
    "chat.reasoning_parser": "tests/stages/gateway/replies/test_chat.py::test_reasoning_is_returned_beside_the_content",
}
"""Each key, and the test that fails if the key has no effect."""


def has_a_choice(key: Key) -> bool:
    """Whether there is another value than the default."""
    return not (isinstance(key.type, inspect.LiteralType) and len(key.type.values) == 1)


def keys_of(tree: type[msgspec.Struct] | None = None) -> set[str]:
    tables = sections() if tree is None else sections(tree)
    return {key.dotted for table in tables for key in table.keys if has_a_choice(key)}


@cache
def names_in(path: str) -> frozenset[str]:
    """The tests of a file, those of classes as `Class::test`."""
    found: set[str] = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        found |= {prefix + one.name for one in inner if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
    return frozenset(found)


def test_every_key_has_a_test_of_its_effect() -> None:
    keys = keys_of()
    assert sorted(keys - EFFECTS.keys()) == [], "keys without a test: write one, and name it in EFFECTS"
    assert sorted(EFFECTS.keys() - keys) == [], "entries of EFFECTS for keys that do not exist"


def test_every_test_in_the_table_exists() -> None:
    missing = []
    for key, test in EFFECTS.items():
        path, _, name = test.partition("::")
        if not (ROOT / path).is_file() or name not in names_in(path):
            missing.append(f"{key}: {test}")
    assert missing == []


def test_a_key_without_a_test_is_found() -> None:
    class More(msgspec.Struct):
        new_key: int = 0

    assert keys_of(More) - EFFECTS.keys() == {"new_key"}
