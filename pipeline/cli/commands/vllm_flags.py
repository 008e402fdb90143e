"""vLLM's options, and the corresponding settings of Pipeline."""

from collections.abc import Iterable

AS_SETTINGS = {
    "--api-key": "gateway.api_keys_file=FILE",
    "--api-server-count": "gateway.replicas=N",
    "--async-scheduling": "schedule.max_steps_in_flight=2",
    "--device": "execute.device=NAME",
    "--download-dir": "cache_dir=FOLDER",
    "--dtype": "execute.dtype=NAME",
    "--generation-config": "generation_config=FOLDER",
    "--gpu-memory-utilization": "execute.gpu_memory_utilization=SHARE",
    "--kv-cache-memory-bytes": "execute.kv_cache_bytes=BYTES",
    "--long-prefill-token-threshold": "schedule.long_prompt_tokens=N",
    "--max-logprobs": "limits.max_logprobs=N",
    "--max-model-len": "max_model_len=N",
    "--max-num-batched-tokens": "schedule.max_num_batched_tokens=N",
    "--max-num-seqs": "schedule.max_num_seqs=N",
    "--no-async-scheduling": "schedule.max_steps_in_flight=1",
    "--no-enable-prefix-caching": "schedule.prefix_caching=false",
    "--quantization": "quantization=NAME",
    "--reasoning-parser": "chat.reasoning_parser=NAME",
    "--scheduling-policy": "schedule.policy=NAME",
    "--served-model-name": "served_model_name=NAME",
    "--swap-space": "execute.swap_bytes=BYTES",
    "--tool-call-parser": "chat.tool_call_parser=NAME",
    "--uvicorn-log-level": "log_level=NAME",
}
"""In the form that `--set` takes. docs/http.md has the same table."""


def hint(words: Iterable[str]) -> str:
    """A hint for unknown options that vLLM has; empty for others."""
    names = [word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")]
    settings = dict.fromkeys(AS_SETTINGS[name] for name in names if name in AS_SETTINGS)
    return f"; did you mean {' '.join(f'--set {setting}' for setting in settings)}?" if settings else ""
