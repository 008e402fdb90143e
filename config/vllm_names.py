"""vLLM's names of settings: of the options of `vllm serve`, and of the arguments of its `LLM`. Those that set one of
our settings, and those that are refused with the reason."""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from pipeline.config.sections.requests import MAX_IMAGES, MAX_LOGPROBS, LimitSettings
from pipeline.config.settings import Settings

AS_SETTINGS = {
    "--allow-credentials": "gateway.allow_credentials=true",
    "--allowed-headers": "gateway.allowed_headers=LIST",
    "--allowed-media-domains": "gateway.allowed_media_domains=LIST",
    "--allowed-methods": "gateway.allowed_methods=LIST",
    "--allowed-origins": "gateway.allowed_origins=LIST",
    "--api-server-count": "gateway.replicas=N",
    "--async-scheduling": "schedule.max_steps_in_flight=2",
    "--chat-template": "chat_template=FILE",
    "--device": "execute.device=NAME",
    "--disable-hybrid-kv-cache-manager": "execute.hybrid_kv_cache_manager=false",
    "--download-dir": "cache_dir=FOLDER",
    "--dtype": "execute.dtype=NAME",
    "--enable-per-request-metrics": "gateway.per_request_metrics=true",
    "--enable-prefix-caching": "schedule.prefix_caching=true",
    "--enable-sleep-mode": "gateway.enable_sleep_mode=true",
    "--generation-config": "generation_config=FOLDER",
    "--hf-overrides": "hf_overrides=JSON",
    "--gpu-memory-utilization": "execute.gpu_memory_utilization=SHARE",
    "--kv-cache-dtype": "execute.kv_dtype=NAME",
    "--kv-cache-memory-bytes": "execute.kv_cache_bytes=BYTES",
    "--kv-offloading-size": "execute.swap_bytes=BYTES",
    "--limit-mm-per-prompt": "limits.max_images=IMAGES",
    "--long-prefill-token-threshold": "schedule.long_prompt_tokens=N",
    "--lora-modules": "lora.adapters=MODULES",
    "--max-cpu-loras": "lora.max_cpu_loras=N",
    "--max-logprobs": "limits.max_logprobs=N",
    "--max-lora-rank": "lora.max_lora_rank=N",
    "--max-loras": "lora.max_loras=N",
    "--max-model-len": "max_model_len=N",
    "--max-num-batched-tokens": "schedule.max_num_batched_tokens=N",
    "--max-num-queued-reqs": "gateway.max_open_sequences=N",
    "--max-num-seqs": "schedule.max_num_seqs=N",
    "--no-async-scheduling": "schedule.max_steps_in_flight=1",
    "--no-enable-prefix-caching": "schedule.prefix_caching=false",
    "--quantization": "quantization=NAME",
    "--reasoning-budget": "chat.reasoning_budget=TOKENS",
    "--reasoning-budget-message": "chat.reasoning_budget_message=TEXT",
    "--reasoning-parser": "chat.reasoning_parser=NAME",
    "--scheduling-policy": "schedule.policy=NAME",
    "--served-model-name": "served_model_name=NAME",
    "--ssl-ca-certs": "gateway.ssl_ca_certs=FILE",
    "--ssl-certfile": "gateway.ssl_certfile=FILE",
    "--ssl-keyfile": "gateway.ssl_keyfile=FILE",
    "--otlp-traces-endpoint": "gateway.otlp_traces_endpoint=URL",
    "--pipeline-parallel-size": "execute.pipeline_parallel=N",
    "--pp": "execute.pipeline_parallel=N",
    "--swap-space": "execute.swap_bytes=BYTES",
    "--tensor-parallel-size": "execute.tensor_parallel=N",
    "--tool-call-parser": "chat.tool_call_parser=NAME",
    "--tp": "execute.tensor_parallel=N",
    "--uvicorn-log-level": "log_level=NAME",
}
"""In the form that `--set` takes; a value in capitals is the option's argument. docs/http.md has the same table. The
`--reasoning-budget` options are llama.cpp's."""


class UnsupportedOption(NamedTuple):
    """An option that has no meaning here."""

    advice: str
    """What to do instead."""
    ignored_arguments: tuple[str, ...] = ()
    """Arguments that change nothing, so they are accepted."""


_ONE_DEVICE = "leave it out, and start several servers for more throughput"
_NO_REQUEST_LOG = "leave it out: requests are only logged with --set log_level=debug"
_CHUNKED = "prompts are always computed in chunks of at most --max-num-batched-tokens; leave it out"
UNSUPPORTED_OPTIONS = {
    "--block-size": UnsupportedOption("a KV block always has 16 tokens; leave it out", ("16",)),
    "--compilation-config": UnsupportedOption("leave it out: there is nothing to compile"),
    "--cpu-offload-gb": UnsupportedOption("weights can't be offloaded; leave it out, or use --quantization", ("0",)),
    "--data-parallel-size": UnsupportedOption(_ONE_DEVICE, ("1",)),
    "--disable-log-requests": UnsupportedOption(_NO_REQUEST_LOG),
    "--disable-log-stats": UnsupportedOption("leave it out: stats are not logged, but served at /metrics"),
    "--disable-uvicorn-access-log": UnsupportedOption(_NO_REQUEST_LOG),
    "--enable-auto-tool-choice": UnsupportedOption("leave it out: tool_choice 'auto' always works"),
    "--enable-chunked-prefill": UnsupportedOption(_CHUNKED),
    "--enable-log-requests": UnsupportedOption("use --set log_level=debug"),
    "--enable-ssl-refresh": UnsupportedOption("leave it out, and restart the server to read new certificates"),
    "--enforce-eager": UnsupportedOption("leave it out: a CPU uses no CUDA graphs, and a GPU always does"),
    "--load-format": UnsupportedOption("leave it out: the format is read from the model's files", ("auto",)),
    "--no-enable-chunked-prefill": UnsupportedOption(_CHUNKED),
    "--no-enable-log-requests": UnsupportedOption(_NO_REQUEST_LOG),
    "--override-generation-config": UnsupportedOption(
        "set the sampling parameters in each request, or use --generation-config with a folder that has another "
        "generation_config.json"
    ),
    "--revision": UnsupportedOption("write it behind the model: ORG/NAME@REVISION"),
    "--rope-scaling": UnsupportedOption("""use --hf-overrides '{"rope_scaling": {...}}'"""),
    "--rope-theta": UnsupportedOption("""use --hf-overrides '{"rope_theta": NUMBER}'"""),
    "--root-path": UnsupportedOption("let the proxy remove the prefix from the path"),
    "--seed": UnsupportedOption("set `seed` in each request: a request without one gets a random seed", ("0",)),
    "--speculative-config": UnsupportedOption(
        "use --set speculative.method=ngram, draft_model or eagle, with speculative.draft=MODEL, "
        "speculative.num_speculative_tokens, speculative.prompt_lookup_max and speculative.prompt_lookup_min"
    ),
    "--ssl-cert-reqs": UnsupportedOption("use --ssl-ca-certs: with it, clients need a certificate"),
    "--tokenizer": UnsupportedOption("the tokenizer is read from the model's folder; leave it out"),
    "--tokenizer-mode": UnsupportedOption("leave it out: the model's own tokenizer is used", ("auto",)),
    "--trust-remote-code": UnsupportedOption("leave it out: no code of a checkpoint is ever run"),
}

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG]?)")
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
OWN_NAMES = {
    "--dtype": {"auto": "bfloat16", "float": "float32"},
    "--generation-config": {"vllm": "none"},
    "--kv-cache-dtype": {"int8_per_token_head": "int8"},
    "--max-model-len": {"-1": "0", "auto": "0"},
    "--tool-call-parser": {"llama3_json": "llama3", "llama4_json": "llama3"},
}
"""Values that have another name here."""

ENABLE_LORA = "--enable-lora"
"""Sets nothing: `--lora-modules` and `lora.*` enable adapters."""


def converted(flag: str, text: str) -> str:
    """An option's argument as the value of its setting. Raises ValueError. Not for `--lora-modules`."""
    form = AS_SETTINGS[flag].partition("=")[2]
    text = OWN_NAMES.get(flag, {}).get(text, text)
    if flag == "--dtype" and text in ("half", "float16"):
        raise ValueError(f"{text} is not supported: use bfloat16 or float32")
    if flag == "--kv-cache-dtype" and text not in ("auto", "int8"):
        raise ValueError(
            f"{text} is not supported: use int8, which takes as little memory as fp8 and has a scale for each "
            "token and head, or auto, the type of --dtype"
        )
    if flag == "--max-logprobs" and text == "-1":
        raise ValueError(f"-1, vLLM's 'no limit', is not supported: use 0 to {MAX_LOGPROBS}")
    if flag in ("--swap-space", "--kv-offloading-size"):  # in GiB
        return str(_count(f"{text}G"))
    if form == "IMAGES":
        return str(_max_images(text))
    return str(_count(text)) if form in ("N", "BYTES") else text


def from_arguments(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[str, Any]]]:
    """Divides keyword arguments into those that are settings of ours, or unknown, and the values that vLLM's give
    settings: by dotted key, the argument's name and the value. Raises ValueError for arguments that are refused."""
    own: dict[str, Any] = {}
    values: dict[str, tuple[str, Any]] = {}
    for name, value in given.items():
        flag = f"--{name.replace('_', '-')}"
        is_known = flag in AS_SETTINGS or flag in UNSUPPORTED_OPTIONS or flag == ENABLE_LORA
        if name == "hf_overrides" and isinstance(value, Mapping):
            own[name] = json.dumps(value)
        elif name in Settings.__struct_fields__ or not is_known:
            own[name] = value
        elif value is None or flag == ENABLE_LORA:
            continue
        elif (unsupported := UNSUPPORTED_OPTIONS.get(flag)) is not None:
            if value is not False and str(value) not in unsupported.ignored_arguments:
                raise ValueError(f"{name}: this argument of vLLM is not supported: {unsupported.advice}")
        elif (found := _value_of(name, flag, value)) is not None:
            key, chosen = found
            other, before = values.setdefault(key, (name, chosen))
            if before != chosen:
                raise ValueError(f"{name}: gives {key} the value {chosen}, but {other} gives it {before}")
    return own, values


def _value_of(name: str, flag: str, value: Any) -> tuple[str, Any] | None:
    """The key and the value of the setting that an argument gives; None if it changes nothing. Raises ValueError."""
    key, _, form = AS_SETTINGS[flag].partition("=")
    if form.isupper():
        if form == "IMAGES" and isinstance(value, dict):
            value = json.dumps(value)
        if isinstance(value, list | dict):
            return key, value
        try:
            text = converted(flag, str(value))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if form in ("N", "BYTES", "IMAGES"):
            return key, int(text)
        return key, value if form == "SHARE" else text
    if not isinstance(value, bool):
        raise ValueError(f"{name}: needs True or False, got {value!r}")
    if not value:
        opposite = AS_SETTINGS.get(f"--no{flag[1:]}")
        if opposite is None:
            return None
        form = opposite.partition("=")[2]
    return key, {"true": True, "false": False}[form] if form in ("true", "false") else int(form)


def _max_images(text: str) -> int:
    """Of {"image": N}, where N may also be {"count": N}. Raises ValueError."""
    example = f"""needs an object such as {{"image": 4}}, got {text!r}"""
    try:
        limits = json.loads(text)
    except ValueError:
        raise ValueError(example) from None
    if not isinstance(limits, dict):
        raise ValueError(example)
    if others := sorted(set(limits) - {"image", "audio", "video"}):
        raise ValueError(f"{others[0]!r} is no kind of input: use image, audio or video")
    if "image" not in limits:
        return LimitSettings().max_images
    found = limits["image"]
    found = found.get("count") if isinstance(found, dict) else found
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise ValueError(example)
    return min(found, MAX_IMAGES)


def _count(text: str) -> int:
    """A number such as 4096, 4k (4000) or 4K (4096). Raises ValueError."""
    if (match := _COUNT.fullmatch(text)) is None:
        raise ValueError(f"needs a number such as 4096 or 4K, got {text!r}")
    return round(float(match[1]) * _FACTORS[match[2]])
