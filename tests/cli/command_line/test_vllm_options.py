"""`pipeline serve` accepts vLLM's options."""

import pytest

from pipeline.config.settings import Settings
from pipeline.config.vllm_names import AS_SETTINGS, UNSUPPORTED_OPTIONS
from tests.cli.command_line.commands import ROOT, run

VLLM_OPTIONS = {
    "--allow-credentials": ("gateway.allow_credentials", True),
    '--allowed-headers=["x-a"]': ("gateway.allowed_headers", ("x-a",)),
    '--allowed-media-domains=["a.example"]': ("gateway.allowed_media_domains", ("a.example",)),
    '--allowed-methods=["GET", "POST"]': ("gateway.allowed_methods", ("GET", "POST")),
    '--allowed-origins=["*"]': ("gateway.allowed_origins", ("*",)),
    "--api-server-count=2": ("gateway.replicas", 2),
    "--async-scheduling": ("schedule.max_steps_in_flight", 2),
    "--device=cuda": ("execute.device", "cuda"),
    "--download-dir=/a": ("cache_dir", "/a"),
    "--dtype=float": ("execute.dtype", "float32"),
    "--disable-hybrid-kv-cache-manager": ("execute.hybrid_kv_cache_manager", False),
    "--enable-prefix-caching": ("schedule.prefix_caching", True),
    "--enable-sleep-mode": ("gateway.enable_sleep_mode", True),
    "--enable-per-request-metrics": ("gateway.per_request_metrics", True),
    "--otlp-traces-endpoint=http://[::1]:4318/v1/traces": (
        "gateway.otlp_traces_endpoint",
        "http://[::1]:4318/v1/traces",
    ),
    '--hf-overrides={"rope_theta": 1e6}': ("hf_overrides", '{"rope_theta": 1e6}'),
    "--chat-template=chatml.jinja": ("chat_template", "chatml.jinja"),
    "--generation-config=folder": ("generation_config", "folder"),
    "--generation-config=vllm": ("generation_config", "none"),
    "--gpu-memory-utilization=0.5": ("execute.gpu_memory_utilization", 0.5),
    "--kv-cache-dtype=auto": ("execute.kv_dtype", "auto"),
    "--kv-cache-dtype=int8": ("execute.kv_dtype", "int8"),
    "--kv-cache-dtype=int8_per_token_head": ("execute.kv_dtype", "int8"),
    "--kv-cache-memory-bytes=1G": ("execute.kv_cache_bytes", 2**30),
    '--limit-mm-per-prompt={"image": 4, "video": 0}': ("limits.max_images", 4),
    '--limit-mm-per-prompt={"image": {"count": 2}}': ("limits.max_images", 2),
    '--limit-mm-per-prompt={"audio": 1}': ("limits.max_images", 100),
    "--long-prefill-token-threshold=7": ("schedule.long_prompt_tokens", 7),
    "--lora-modules=sql=/a": ("lora.adapters", {"sql": "/a"}),
    '--lora-modules={"name": "a b", "path": "/x", "base_model_name": null}': ("lora.adapters", {"a b": "/x"}),
    "--max-cpu-loras=9": ("lora.max_cpu_loras", 9),
    "--max-lora-rank=8": ("lora.max_lora_rank", 8),
    "--max-loras=3": ("lora.max_loras", 3),
    "--max-logprobs=5": ("limits.max_logprobs", 5),
    "--max-model-len=4k": ("max_model_len", 4000),
    "--max-num-batched-tokens=1K": ("schedule.max_num_batched_tokens", 1024),
    "--max-num-queued-reqs=64": ("gateway.max_open_sequences", 64),
    "--max_num_seqs=3": ("schedule.max_num_seqs", 3),
    "--no-async-scheduling": ("schedule.max_steps_in_flight", 1),
    "--no-enable-prefix-caching": ("schedule.prefix_caching", False),
    "--quantization=q8_0": ("quantization", "q8_0"),
    "--reasoning-budget=-1": ("chat.reasoning_budget", -1),
    "--reasoning-budget-message=Enough.": ("chat.reasoning_budget_message", "Enough."),
    "--reasoning-parser=qwen3": ("chat.reasoning_parser", "qwen3"),
    "--scheduling-policy=priority": ("schedule.policy", "priority"),
    "--served-model-name=mine": ("served_model_name", "mine"),
    "--ssl-ca-certs=ca.pem --ssl-certfile=a.pem": ("gateway.ssl_ca_certs", "ca.pem"),
    "--ssl-certfile=a.pem": ("gateway.ssl_certfile", "a.pem"),
    "--ssl-keyfile=a.key --ssl-certfile=a.pem": ("gateway.ssl_keyfile", "a.key"),
    "--kv-offloading-size=0.25": ("execute.swap_bytes", 2**28),
    "--swap-space=0.5": ("execute.swap_bytes", 2**29),
    "--tensor-parallel-size=2": ("execute.tensor_parallel", 2),
    "--tp=3": ("execute.tensor_parallel", 3),
    "--pipeline-parallel-size=2": ("execute.pipeline_parallel", 2),
    "--pp=3": ("execute.pipeline_parallel", 3),
    "--tool-call-parser=llama3_json": ("chat.tool_call_parser", "llama3"),
    "--uvicorn-log-level=warning": ("log_level", "warning"),
}


def value_of(settings: Settings, dotted: str) -> object:
    found: object = settings
    for name in dotted.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize(("options", "setting"), VLLM_OPTIONS.items())
def test_serve_accepts_vllm_s_options(
    options: str, setting: tuple[str, object], served: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run("serve", *options.replace(" --", "\n--").split("\n"), "MODEL", capsys=capsys)
    assert (code, "error" in err) == (3, False), err
    assert value_of(served[0], setting[0]) == setting[1]
    assert served[0].model == "MODEL"


def test_every_vllm_option_is_tried_and_arguments_that_change_nothing_are_accepted(
    served: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    tried = {option.partition("=")[0].replace("_", "-") for option in VLLM_OPTIONS}
    assert tried == set(AS_SETTINGS)
    ignored = [
        f"{flag}={value}" for flag, refused in UNSUPPORTED_OPTIONS.items() for value in refused.ignored_arguments
    ]
    assert len(ignored) > 5
    assert run("serve", *ignored, capsys=capsys) == (3, "", "")
    assert served == [Settings()]


def test_a_share_of_gpu_memory_is_a_warning_on_a_cpu(
    served: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    for share in ("0.5", "0.9"):  # also the default
        _, _, err = run("serve", "--gpu-memory-utilization", share, capsys=capsys)
        assert err.startswith("pipeline: warning: ") and "gpu" in err and "no effect" in err and err.count("\n") == 1
    assert "no effect" not in run("serve", "--gpu-memory-utilization", "0.9", "--device", "cuda", capsys=capsys)[2]
    assert "no effect" not in run("serve", capsys=capsys)[2]


def test_the_equivalent_of_each_vllm_option_is_a_setting() -> None:
    docs = (ROOT / "docs" / "http.md").read_text("utf-8")
    for flag in UNSUPPORTED_OPTIONS:
        assert f"`{flag}`" in docs
    for flag, setting in AS_SETTINGS.items():
        assert f"| `{flag}` | `{setting}` |" in docs
        section: object = Settings()
        for name in setting.partition("=")[0].split("."):
            section = getattr(section, name)
