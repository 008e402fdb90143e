"""Tests that `make test` leaves out, because others test the same code: at one moment, with one stage or one client, or
in another of many cases.

    PIPELINE_ALL_CASES=1 tools/check tests      run them too
"""

import os
import zlib
from collections.abc import Iterable

import pytest

LONG = (
    # Clients that build on a client which is tested.
    "tests/e2e/client/sdks/test_other_clients.py::test_python_clients_work[with_langchain.py]",
    "tests/e2e/client/sdks/test_other_clients.py::test_python_clients_work[with_instructor.py]",
    "tests/e2e/client/sdks/test_other_clients.py::test_python_clients_work[with_llm.py]",
    "tests/e2e/client/sdks/test_other_clients.py::test_javascript_clients_work[with_anthropic.mjs]",
    "tests/e2e/client/sdks/test_other_clients.py::test_javascript_clients_work[with_ollama.mjs]",
    "tests/e2e/client/sdks/test_other_clients.py::test_javascript_clients_work[with_openai.mjs]",
    "tests/e2e/client/sdks/test_image_clients.py::test_langchain_messages_have_images",
    "tests/e2e/client/sdks/test_agents_sdk.py::"
    "test_a_forced_call_is_run_and_its_output_is_answered[responses-plan_visit-whole]",
    "tests/e2e/client/sdks/test_agents_sdk.py::test_an_agent_answers[chat-whole]",
    "tests/e2e/client/sdks/test_agents_sdk.py::test_an_agent_answers[responses-streamed]",
    "tests/e2e/client/sdks/test_agents_sdk.py::test_a_session_repeats_the_conversation[chat]",
    "tests/e2e/client/sdks/test_agents_sdk.py::"
    "test_a_forced_call_is_run_and_its_output_is_answered[chat-required-whole]",
    "tests/e2e/client/test_reconnect.py::test_streams_of_the_javascript_client_outlive_their_gateway_and_their_server",
    # Many requests, or long ones.
    "tests/e2e/client/test_llm.py::test_thousands_of_prompts_keep_their_order_and_memory_is_bounded",
    "tests/e2e/client/sdks/test_openai_client.py::test_a_long_prompt_goes_through_shared_memory",
    "tests/e2e/http/attacks/test_open_bytes.py",
    "tests/tools/part_bench/test_towers.py",
    "tests/e2e/http/attacks/test_open_bytes_pooled.py",
    "tests/e2e/models/test_encoder_memory.py::test_memory_does_not_grow_with_the_texts",
    "tests/cli/check/test_check_gguf.py::test_the_frequencies_of_llama_3_are_those_of_its_gguf_file",
    "tests/cli/check/test_check_gguf.py::test_a_tensor_of_a_gguf_file_that_is_computed_wrongly_fails",
    "tests/cli/check/test_check_model.py::test_a_window_longer_than_every_prompt_is_reported_as_unchecked",
    "tests/cli/check/test_check_model.py::test_a_config_is_enough_to_check_an_architecture[Phi-4-mini]",
    "tests/cli/check/test_check_model.py::test_a_config_is_enough_to_check_an_architecture[SmolLM2]",
    "tests/cli/check/test_check_gguf.py::test_a_gguf_file_of_each_architecture_is_compared[mixtral]",
    "tests/cli/check/test_check_model.py::test_it_runs_as_a_command",
    "tests/cli/check/test_check_model.py::test_one_broken_program_fails_alone",
    "tests/cli/check/test_check_gguf.py::test_the_parts_of_a_gguf_file_are_compared_as_one",
    "tests/cli/profile/test_profile_command.py::test_a_shape_is_profiled_on_this_machine",
    "tests/stages/execute/models/test_smollm2.py::test_twenty_prompts_at_once_continue_like_the_reference",
    # A server of its own: tests/e2e/http/access/test_auth.py has the same parts of one that runs already.
    "tests/e2e/http/access/test_named_keys.py",
    # Deaths of a stage: tests/recovery has all of them in one process, tests/e2e/recovery/test_recovery.py has one of
    # each stage.
    "tests/e2e/client/test_llm.py::test_a_server_that_dies_ends_generate_with_an_error[gateway]",
    "tests/e2e/client/test_llm.py::test_a_server_that_dies_ends_generate_with_an_error[supervisor]",
    "tests/e2e/client/test_reconnect.py::test_requests_outlive_their_gateway_before_they_have_output",
    "tests/e2e/client/test_reconnect.py::test_streams_outlive_their_gateway_and_those_of_another_do_not_notice[1]",
    "tests/e2e/models/test_kv_int8.py::test_no_client_notices_the_death_of_a_stage",
    # bert has all stages. What others send reaches these in the same messages; labels have the way of scores.
    "tests/e2e/models/test_encoders.py::test_no_client_notices_the_death_of_a_stage[bert, sequence",
    "tests/e2e/models/test_encoders.py::test_nothing_is_kept_of_texts_but_by_decoders[bert, sequence",
    "tests/e2e/models/test_encoders.py::test_the_executor_has_no_process_for_grammars[bert, sequence",
    "tests/e2e/models/test_encoders.py::test_generation_is_refused_and_names_the_tasks[bert, sequence",
    "tests/e2e/models/test_encoders.py::test_no_client_notices_the_death_of_a_stage[cross-encoder-",
    "tests/e2e/models/test_encoders.py::test_no_client_notices_the_death_of_a_stage[Qwen3-Reranker-",
    # Swap space has what there is without it, too; adapters, images and states go through execute and schedule.
    "tests/e2e/test_recurrent.py::test_no_client_notices_the_death_of_a_stage[no swap space-ingest",
    "tests/e2e/test_recurrent.py::test_no_client_notices_the_death_of_a_stage[no swap space-schedule",
    "tests/e2e/test_recurrent.py::test_no_client_notices_the_death_of_a_stage[no swap space-detokenize",
    "tests/e2e/models/test_images.py::test_no_client_notices_the_death_of_a_stage[detokenize]",
    "tests/e2e/models/test_excluded_tokens.py::"
    "test_a_reply_that_goes_on_after_a_death_is_not_at_its_begin_again[ingest]",
    # Several models have the stages of one each; those that hold their requests are killed.
    "tests/e2e/several/test_several_models.py::"
    "test_a_stage_of_one_model_that_is_killed_leaves_the_streams_of_the_other_alone[ingest]",
    "tests/e2e/several/test_several_models.py::"
    "test_a_stage_of_one_model_that_is_killed_leaves_the_streams_of_the_other_alone[detokenize]",
    "tests/e2e/replaced/test_signals.py::test_all_processes_end[several models-start",
    "tests/e2e/replaced/test_signals.py::test_all_processes_end[several models-stopped first",
    "tests/e2e/replaced/test_signals.py::test_all_processes_end[several models-sleep",
    # A sleep: two ranks have what one has, and an EAGLE head what a draft model has. `pipeline stop` sends the signal.
    "tests/e2e/recovery/test_sleep_ends.py::test_a_server_that_cannot_wake_sleeps_on_says_why_and_wakes_when_it_can[1]",
    "tests/e2e/recovery/test_sleep_ends.py::test_a_server_that_ends_wakes_and_finishes_its_streams[pipeline stop]",
    "tests/e2e/recovery/test_sleep_kinds.py::test_draft_models_sleep[draft_model]",
    "tests/e2e/recovery/test_sleep_gateway.py::"
    "test_streams_outlive_a_gateway_that_dies_while_the_server_sleeps[falling asleep]",
    "tests/e2e/recovery/test_life_and_death.py::"
    "test_a_server_that_was_suspended_for_longer_than_the_hang_timeout_goes_on",
    "tests/e2e/recovery/test_life_and_death.py::test_a_signal_under_load_finishes_streams_and_leaves_no_process[2]",
    "tests/e2e/recovery/test_life_and_death.py::test_a_signal_under_load_finishes_streams_and_leaves_no_process[1]",
    "tests/e2e/recovery/test_life_and_death.py::test_a_signal_during_startup_ends_the_start[2]",
    "tests/e2e/recovery/test_life_and_death.py::test_a_stage_in_an_endless_loop_is_killed_and_streams_go_on[execute]",
    "tests/e2e/recovery/test_life_and_death.py::test_each_stage_that_is_stopped_is_killed_and_requests_go_on",
    "tests/e2e/recovery/test_life_and_death.py::"
    "test_without_restarts_a_killed_stage_is_named_in_the_log_and_to_clients_and_the"
    "_server_ends[gateway]",
    "tests/e2e/recovery/test_poison.py",
    "tests/e2e/hosts/test_ranks.py::test_a_rank_is_restarted_on_purpose_with_the_others",
    "tests/e2e/hosts/test_ranks.py::test_a_rank_that_stands_still_is_named_and_all_ranks_are_replaced",
    "tests/e2e/hosts/test_ranks.py::test_no_client_notices_the_death_of_a_rank[execute.1",
    "tests/e2e/hosts/test_ranks.py::test_no_client_notices_the_death_of_a_stage",
    "tests/e2e/recovery/test_recovery.py::test_no_client_notices_that_a_successor_dies_too",
    "tests/e2e/recovery/test_recovery.py::test_no_client_notices_the_deaths_of_two_stages_at_once",
    "tests/e2e/hosts/test_replicas.py::test_no_client_notices_the_death_of_a_replica[detokenize.2]",
    "tests/e2e/recovery/test_scaling.py::test_a_zmq_stream_that_does_not_end_in_time_goes_on_at_another_gateway",
    "tests/e2e/recovery/test_scaling.py::test_another_stage_may_die_meanwhile",
    "tests/e2e/recovery/test_scaling.py::"
    "test_if_a_new_process_dies_the_reload_fails_and_the_server_serves_as_before[ingest]",
    "tests/e2e/client/test_reconnect.py::test_a_batch_outlives_the_gateway_of_its_own_server",
    "tests/e2e/recovery/test_recovery.py::test_no_client_notices_restarts_on_purpose",
    "tests/e2e/hosts/test_replicas.py::test_replicas_return_the_same_texts_as_one_of_each",
    "tests/e2e/models/test_speculation.py::test_texts_are_the_same_also_when_the_executor_dies",
    # Sleeps and replacements: one executor of several, one signal, one moment.
    "tests/e2e/recovery/test_sleep.py::test_any_executor_on_a_cpu_may_leave[execute.kernels=torch",
    "tests/e2e/recovery/test_sleep.py::test_any_executor_on_a_cpu_may_leave[execute.pipeline_parallel=2",
    "tests/e2e/recovery/test_sleep.py::test_any_executor_on_a_cpu_may_leave[execute.kv_dtype=int8",
    "tests/e2e/recovery/test_sleep_kinds.py::test_draft_models_sleep",
    "tests/e2e/recovery/test_sleep_gateway.py::test_streams_outlive_a_gateway_that_dies_while_the_server_sleeps[waking]",
    "tests/e2e/recovery/test_scaling.py::test_clients_receive_what_they_would_have_received[stages1]",
    "tests/e2e/replaced/test_new_server.py::test_a_signal_while_streams_of_the_replaced_server_are_open_ends_both",
    "tests/e2e/replaced/test_signals.py::test_all_processes_end[one model-stopped first",
    "tests/e2e/several/test_turns.py::test_a_stage_that_is_killed_during_a_swap_changes_no_text[schedule]",
    "tests/stages/ingest/test_fairness.py::test_fair_turns_are_replayed[False",
    # It compiles a library of its own; tests/kernels/cpu/library/test_build.py tests how, and with which options.
    "tests/stages/execute/cpu/test_quick_library.py",
    # The table beside it has the results; this one asks llama.cpp, whose library npm fetches.
    "tests/stages/prepare/gguf/test_gguf_special_tokens.py::test_every_file_s_special_tokens_are_those_of_llama_cpp",
    # Limits that tests/stages and tests/supervisor have.
    "tests/e2e/http/access/test_admission.py::test_a_batch_past_its_deadline_returns_its_partial_outputs",
    "tests/e2e/test_observability.py::test_top_shows_a_hanging_stage_as_late_despite_a_long_health_timeout",
    "tests/e2e/test_same_backend.py::test_a_reload_does_not_change_the_back_end",
    "tests/e2e/start/test_settings.py::test_health_timeout_s_limits_a_stage_s_answer",
    # tests/hosts/test_placement.py has the same refusal, and test_deploy.py a cluster of Ray.
    "tests/e2e/hosts/test_ray.py",
    # A cluster of Ray takes a minute to start: tests/deploy and several/test_relayed.py have the relay, tests/hosts has
    # placements and tokens. The nightly has `replicas`, too.
    "tests/e2e/hosts/test_deploy.py::test_a_dead_replica_s_streams_continue_at_another_one",
    "tests/e2e/hosts/test_deploy.py::test_only_those_who_may_reach_the_cluster_and_the_servers",
    "tests/e2e/hosts/test_deploy.py::test_servers_that_run_already_are_relayed_to_and_a_signal_lets_streams_end",
    # tests/stages/execute/ranks has the refusals.
    "tests/e2e/hosts/test_ranks.py::test_a_model_that_cannot_be_cut_is_refused",
    # One of several formats, features or ways. Of towers and processors, tests/stages/execute/vision and tests/media
    # compare all with transformers.
    "tests/e2e/models/test_images.py::test_the_ids_are_those_of_transformers[llava, siglip]",
    "tests/e2e/models/test_images.py::test_the_ids_are_those_of_transformers[llava, pixtral]",
    "tests/e2e/models/test_images.py::test_the_ids_are_those_of_transformers[llava]",
    "tests/e2e/models/test_images.py::test_the_ids_are_those_of_transformers[llava_onevision]",
    "tests/e2e/models/test_images.py::test_the_ids_are_those_of_transformers[mistral3]",
    "tests/e2e/models/test_images_gguf.py::test_the_ids_are_those_of_transformers[idefics3]",
    "tests/e2e/models/test_images_gguf.py::test_the_ids_are_those_of_transformers[mistral3]",
    # Images beside other features: tests/stages/schedule/media has histories of them. Of servers, those are run whose
    # rows are cut, copied, proposed or in flight.
    "tests/e2e/models/test_image_combinations.py::test_the_ids_are_those_of_a_server_without_it[draft model]",
    "tests/e2e/models/test_image_combinations.py::test_the_ids_are_those_of_a_server_without_it[n-grams]",
    "tests/e2e/models/test_image_combinations.py::test_the_ids_are_those_of_a_server_without_it[pipeline parallel]",
    "tests/e2e/models/test_image_combinations.py::test_the_ids_are_those_of_a_server_without_it[recomputation]",
    "tests/e2e/models/test_image_combinations.py::test_the_ids_are_those_of_a_server_without_it[replicas]",
    "tests/e2e/models/test_patch_images.py::test_the_ids_are_those_of_transformers[qwen2_vl, padded heads]",
    "tests/e2e/models/test_patch_images.py::test_the_ids_are_those_of_transformers[qwen3_vl]",
    "tests/e2e/models/test_patch_images.py::test_the_ids_are_those_of_transformers[qwen3_5_moe]",
    "tests/e2e/models/test_patch_images.py::test_the_ids_are_those_of_a_server_without_it[qwen2_vl-n-grams]",
    "tests/e2e/models/test_patch_images.py::test_the_ids_are_those_of_a_server_without_it[qwen2_vl-pipeline parallel]",
    "tests/e2e/models/test_patch_images.py::test_the_ids_are_those_of_a_server_without_it[qwen2_vl-swap space]",
    "tests/e2e/models/test_patch_images.py::test_the_ids_are_those_of_a_server_without_it[qwen3",
    "tests/e2e/models/test_patch_images.py::test_nothing_changes_the_ids[qwen3",
    "tests/e2e/client/test_llm.py::test_threads_can_share_one_llm",
    "tests/e2e/client/test_llm.py::test_two_llms_run_and_close_independently",
    "tests/e2e/http/test_chat.py::test_ctrl_d_ends_the_chat_and_its_server",
    "tests/e2e/hosts/test_ranks.py::test_an_embedded_server_has_ranks",
    "tests/e2e/test_scopes.py::test_keys_can_share_the_prefix_cache",
    "tests/e2e/test_alone.py::test_a_recording_ends_with_the_command_that_started_it",
    "tests/e2e/models/test_lora.py::test_beam_search_with_an_adapter",
    "tests/e2e/models/test_beam_search.py::test_the_replay_of_a_search_is_bit_identical[execute]",
    "tests/e2e/start/test_start.py::"
    "test_a_server_that_stops_while_kernels_compile_leaves_nothing_incomplete[the-quick-library]",
    "tests/e2e/models/test_quantized_checkpoints.py::test_a_server_of_a_quantized_checkpoint_gives_the_tokens_of_its"
    "_dequantized_weights[fp8",
    "tests/e2e/models/test_quantized_checkpoints.py::test_a_server_of_a_quantized_checkpoint_gives_the_tokens_of_its"
    "_dequantized_weights[nf4",
    "tests/e2e/recovery/test_swap.py::test_a_server_reports_its_swap_blocks_and_frees_the_memory",
    "tests/stages/execute/cuda/drafts/test_eagle.py::test_it_proposes_what_its_formula_says_and_changes_no_text",
    "tests/stages/execute/kv/test_kv_int8.py::"
    "test_the_default_models_most_likely_tokens_are_those_of_a_cache_in_bfloat16",
    "tests/stages/execute/ranks/test_ranks_scheduled.py::test_smollm2_with_two_ranks",
    "tests/stages/execute/models/test_smollm2.py::test_bfloat16_finds_the_same_largest_logit_as_float32",
    "tests/stages/execute/models/test_smollm2.py::test_the_cpu_kernels_find_the_same_largest_logit_as_float32[none]",
    "tests/stages/execute/models/test_smollm2.py::"
    "test_the_cpu_kernels_generate_the_same_alone_and_in_a_batch_of_twenty[none]",
    "tests/stages/execute/models/test_smollm2.py::test_the_cpu_kernels_find_the_same_largest_logit_as_float32[q8_0]",
    "tests/stages/execute/models/test_smollm2.py::"
    "test_the_cpu_kernels_generate_the_same_alone_and_in_a_batch_of_twenty[q8_0]",
    "tests/tools/part_bench/test_schedule.py::test_a_step_is_measured_with_and_without_block_boundaries",
    # Files of real models, where they are. `pipeline check-model --fidelity` measures the same.
    "tests/stages/execute/models/test_gemma.py::test_its_most_likely_tokens_are_those_of_float32",
    "tests/stages/execute/models/test_gemma.py::test_it_continues_a_text_sensibly",
    "tests/stages/execute/models/test_k_quant_models.py",
    # 300 million weights; the other embedder is smaller, and has the same way from the tokenizer to the vector.
    "tests/stages/execute/encoders/test_trained_embedders.py::test_vectors_are_those_of_transformers[embedding-gemma]",
    # Real peers and their processes.
    "tests/e2e/test_compare_peers.py",
    "tests/tools/compare/test_compare_peers.py::test_all_servers_are_measured_one_after_the_other_with_the_same_loads",
    "tests/tools/compare/test_compare_peers.py::test_an_interrupted_run_continues_with_resume",
    "tests/tools/compare/test_compare_peers.py::test_an_interruption_ends_all_processes",
    "tests/tools/compare/test_compare_peers.py::"
    "test_a_server_that_does_not_start_is_reported_and_the_others_are_measured",
    "tests/tools/compare/test_compare_peers.py::test_prompts_arrive_beside_streams",
    # What a step of `make check` does beside the tests.
    "tests/house/test_imports.py::test_no_file_has_a_forbidden_import",
    # Installs: tests/house/test_packaging.py has one of a wheel. Syntax and imports are checked for all versions of
    # Python.
    "tests/house/test_packaging.py::test_an_editable_install_provides_only_the_package",
    "tests/house/test_pythons.py::test_a_source_distribution_makes_the_same_wheel",
    "tests/house/test_pythons.py::test_a_wheel_installs_and_compiles_in_each_available_python[3.11",
    "tests/house/test_pythons.py::test_a_wheel_installs_and_compiles_in_each_available_python[3.12",
    "tests/house/test_pythons.py::test_a_wheel_installs_and_compiles_in_each_available_python[3.13",
    "tests/house/test_pythons.py::test_a_wheel_serves_from_a_folder_of_shadowing_modules",
    # Of the program in PyTorch, which is slow, one case; the native one has all of them. Of Triton's interpreter, few.
    "tests/stages/execute/sampling/test_beam_search.py::"
    "test_beams_that_are_preempted_and_share_memory_with_other_requests[torch",
    "tests/stages/execute/sampling/test_beam_search.py::test_widths_between[torch",
    "tests/stages/execute/drafts/test_eagle.py::test_a_random_head_changes_no_text[torch",
    "tests/stages/execute/drafts/test_eagle3.py::test_a_random_head_changes_no_text[torch",
    "tests/stages/execute/drafts/test_speculation.py::test_texts_and_logprobs_are_the_same[torch-3",
    "tests/stages/execute/drafts/test_speculation.py::test_ngrams_of_a_repeating_text_are_accepted[torch",
    "tests/stages/execute/exactness/test_nan_architectures.py::"
    "test_a_row_that_is_not_finite_changes_no_other[qwen2_moe-torch",
    "tests/stages/execute/cuda/graphs/test_captures.py::test_a_capture_disturbs_no_step[top_k-top_p]",
    "tests/stages/execute/cuda/graphs/test_captures.py::test_a_capture_disturbs_no_step[compiled_grammar]",
    "tests/stages/execute/cuda/models/test_alike.py::test_random_plans[1]",
    "tests/stages/execute/cuda/drafts/test_eagle.py::"
    "test_a_step_with_many_changes_of_rows_may_let_the_head_read_a_prompt",
    "tests/stages/execute/cuda/loop/test_late_kernels.py",
    "tests/stages/execute/cuda/drafts/test_speculation.py::test_structured_output_is_the_same",
    "tests/stages/execute/cuda/test_ranks.py::test_all_ranks_capture_the_same_in_the_same_order",
    "tests/tools/part_bench/test_schedule.py::test_a_missed_bound_fails_only_a_check",
    # What is run again under load, or from the hub.
    "tests/stages/prepare/sources/test_hub.py::test_a_hub_id_can_be_checked",
    "tests/tools/test_soak.py::test_a_short_soak_finds_no_fault",
    "tests/tools/test_soak.py::test_a_short_soak_sends_requests_and_probes",
)
"""Prefixes of ids."""

FEW = {
    "tests/e2e/test_alone.py::test_the_replay_of_a_real_server_s_stage_is_bit_identical": 2,
    "tests/e2e/client/sdks/test_agents_sdk.py::test_a_forced_call_is_run_and_its_output_is_answered": 3,
    "tests/cli/check/test_check_model.py::test_a_config_is_enough_to_check_an_architecture": 8,
    "tests/cli/check/test_check_gguf.py::test_a_gguf_file_of_each_architecture_is_compared": 3,
    "tests/e2e/http/attacks/test_hostile.py::test_hostile_bodies": 7,
    "tests/e2e/http/attacks/test_hostile.py::test_hostile_connections": 3,
    "tests/kernels/cpu/sampling/test_logits_processors.py": 3,
    "tests/kernels/cpu/sampling/test_logprobs.py": 3,
    "tests/kernels/cpu/attention/test_key_ends.py": 8,
    "tests/kernels/cpu/attention/test_native_attention.py": 4,
    "tests/kernels/cpu/ops/": 3,
    "tests/kernels/cpu/test_native_delta.py": 4,
    "tests/kernels/cpu/sampling/test_late_masks.py": 4,
    "tests/kernels/cpu/sampling/test_native_sampler.py": 4,
    "tests/kernels/cpu/library/test_peaks.py::test_peaks_are_plausible": 2,
    "tests/kernels/cpu/library/test_peaks.py::test_the_source_compiles_without_a_warning": 4,
    "tests/kernels/cpu/sampling/test_sample_native.py": 5,
    "tests/kernels/cpu/attention/test_shared_prefixes.py": 6,
    "tests/kernels/cpu/attention/test_unseen_memory.py": 4,
    "tests/kernels/test_invariance.py": 5,
    "tests/kernels/test_matrix.py": 3,
    "tests/kernels/attention/test_paged_attention.py": 4,
    "tests/kernels/sampling/test_sample.py": 6,
    "tests/kernels/triton/attention/test_attention.py": 4,
    "tests/kernels/triton/attention/test_key_ends.py": 4,
    "tests/kernels/triton/gemm/test_experts.py": 2,
    "tests/kernels/triton/gemm/test_linear.py": 3,
    "tests/kernels/triton/test_delta.py": 3,
    "tests/runtime/files/test_private_files.py::test_a_command_writes_to_its_own_descriptors": 3,
    "tests/stages/execute/cuda/models/test_architectures.py": 6,
    "tests/stages/execute/cuda/graphs/test_captures.py": 12,
    "tests/stages/execute/cuda/drafts/test_speculation.py": 2,
    "tests/stages/execute/models/test_architectures.py": 8,
    "tests/stages/execute/sampling/test_beam_search.py::test_beams_without_tokens_that_the_model_excludes": 2,
    "tests/stages/execute/sampling/test_beam_search.py::test_sequences_and_scores_are_those_of_transformers": 6,
    "tests/stages/execute/exactness/test_continuations.py": 8,
    "tests/stages/execute/kv/test_copies.py": 2,
    "tests/stages/execute/drafts/test_eagle.py::test_a_random_head_changes_no_text": 3,
    "tests/stages/execute/models/test_experts.py": 4,
    "tests/stages/execute/models/test_recurrent_models.py": 3,
    "tests/stages/execute/exactness/test_group_texts.py": 4,
    "tests/stages/execute/exactness/test_invariance.py": 4,
    "tests/stages/execute/sampling/test_logits.py": 5,
    "tests/stages/execute/grammar_masks/test_masks.py": 6,
    "tests/stages/execute/exactness/test_nan_rows.py": 3,
    "tests/stages/execute/exactness/test_recurrent_texts.py": 2,
    "tests/stages/execute/encoders/test_encoders.py": 4,
    "tests/stages/execute/cpu/test_native.py": 12,
    "tests/stages/execute/cpu/test_native_rows.py": 12,
    "tests/stages/execute/sampling/test_prompt_logprobs.py": 4,
    "tests/stages/execute/ranks/test_ranks.py": 2,
    "tests/stages/execute/sampling/test_sampler.py::test_samples_follow_the_sampling_options": 3,
    "tests/stages/execute/drafts/test_speculation.py::test_texts_and_logprobs_are_the_same": 6,
    "tests/stages/execute/kv/test_windows.py": 4,
    "tests/stages/gateway/apidocs/test_openapi.py": 2,
    "tests/stages/gateway/replies/test_history.py::test_each_reply_is_history": 2,
    "tests/stages/gateway/zmq/attacks/test_memory.py": 5,
    "tests/stages/ingest/templates/test_real_templates.py": 24,
    "tests/stages/ingest/test_panics.py::test_a_panic_is_a_400_that_names_the_field": 2,
    "tests/stages/ingest/test_reply_start.py": 3,
    "tests/stages/prepare/quantized/test_convert.py": 6,
    "tests/stages/prepare/quantized/test_refused.py": 3,
    "tests/stages/prepare/test_architectures.py": 2,
    "tests/stages/prepare/sources/test_folder.py": 2,
    "tests/stages/prepare/sources/test_folder_refusals.py": 2,
    "tests/stages/prepare/sources/test_folder_tokenizer.py": 2,
    "tests/stages/prepare/sources/test_forms.py": 2,
    "tests/stages/prepare/gguf/test_gguf_architectures.py": 2,
    "tests/stages/prepare/sources/hostile/": 4,
    "tests/stages/prepare/test_quantized_families.py": 2,
    "tests/stages/prepare/tokenizers/test_special_tokens.py": 4,
    "tests/stages/prepare/tokenizers/test_tokenizer_classes.py": 2,
    "tests/stages/schedule/policies/test_depth_tuner.py": 2,
    "tests/stages/schedule/policies/test_preemption.py": 3,
    "tests/stages/schedule/samples/test_beam_search.py::test_histories": 5,
    "tests/stages/schedule/samples/test_beam_search.py::test_it_finds_what_a_search_over_all_ids_finds": 2,
    "tests/stages/schedule/recovery/test_liveness.py": 2,
    "tests/stages/schedule/output/test_token_outputs.py": 2,
    "tests/stages/schedule/test_speculation_groups.py::test_the_ids_are_exact_while_all_of_it_happens": 2,
    "tests/text/formats/test_any_text.py": 3,
    "tests/text/formats/test_families.py": 3,
    "tests/text/formats/test_family_grammars.py": 4,
    "tests/text/formats/test_reasoning.py": 3,
    "tests/text/formats/test_grammars.py": 2,
    "tests/text/formats/test_parsers.py": 8,
    "tests/tools/simulator/test_simulation.py::test_it_agrees_with_the_real_scheduler": 2,
}
"""Prefixes of ids, and of how many cases of such a test one is run. At least `LEAST` of them are."""

LEAST = 2

ONE = (
    "tests/cli/check/test_check_gguf.py::test_a_gguf_file_of_each_architecture_is_compared",
    "tests/cli/check/test_check_model.py::test_a_config_is_enough_to_check_an_architecture",
    "tests/kernels/cpu/library/test_peaks.py::test_peaks_are_plausible",
    "tests/kernels/cpu/library/test_peaks.py::test_the_source_compiles_without_a_warning",
    "tests/kernels/cpu/sampling/test_sample_native.py::test_samples_follow_the_filtered_softmax_over_a_real_vocabulary",
    "tests/kernels/sampling/test_sample.py::test_filtered_samples_follow_the_filtered_distribution",
    "tests/kernels/sampling/test_sample.py::test_samples_follow_the_softmax",
    "tests/kernels/triton/test_delta.py::test_rows_have_the_same_bits_for_any_chunks_neighbours_and_slots",
    "tests/stages/execute/cuda/drafts/test_speculation.py::test_texts_and_logprobs_are_the_same",
    "tests/stages/execute/cuda/graphs/test_captures.py::test_a_capture_disturbs_no_step",
    "tests/stages/execute/cuda/models/test_architectures.py::test_logits_equal_those_of_transformers",
    "tests/stages/execute/exactness/test_continuations.py::test_a_continued_reply_is_the_uncut_one",
    "tests/stages/execute/exactness/test_recurrent_texts.py::",
    "tests/stages/execute/kv/test_windows.py::test_texts_equal_those_of_transformers_despite_preemption",
    "tests/stages/execute/sampling/test_sampler.py::test_samples_follow_the_sampling_options",
    "tests/stages/gateway/zmq/attacks/test_memory.py::test_sixteen_pipelined_messages_of_the_maximum_size_are_answered",
    "tests/tools/checks/test_check_aarch64.py::test_threads_do_not_change_a_step",
)
"""Prefixes of ids of tests of which one case is run, because each takes about a second or more."""


def selected(items: Iterable[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests that are run, in their order, and those that are left out. Which cases are run depends on their ids
    only, so that a failure repeats."""
    items = list(items)
    if os.environ.get("PIPELINE_ALL_CASES"):
        return items, []
    left_out = {one.nodeid for one in items if one.nodeid.startswith(LONG)}
    cases: dict[str, list[str]] = {}
    for name in (item.nodeid for item in items if item.nodeid not in left_out):
        cases.setdefault(name.partition("[")[0], []).append(name)
    for test, ids in cases.items():
        share = next((FEW[one] for one in FEW if test.startswith(one)), 1)
        num_run = 1 if test.startswith(ONE) else max(LEAST, len(ids) // share)
        ids.sort(key=lambda name: (zlib.crc32(name.encode()), name))
        left_out.update(ids[num_run:])
    return [one for one in items if one.nodeid not in left_out], [one for one in items if one.nodeid in left_out]
