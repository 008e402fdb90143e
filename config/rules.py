"""What holds between keys: combinations that can't work, and options that would have no effect."""

import ipaddress
import os
import re
from pathlib import Path

from pipeline.config.settings import ExecuteSettings, Settings
from pipeline.config.values import browsers, core_list, hf_overrides, otlp, port_range, zmq_setting

BYTES_PER_ID = 4
UNNAMED_KEY = re.compile(r"key-\d+")
"""Names of keys that have none: those of gateway.api_keys_file and PIPELINE_API_KEYS."""
MIN_OPEN_BYTES = 2**20
"""The least share of `gateway.max_open_bytes`: room for a request or two."""


def contradictions(settings: Settings) -> list[str]:
    """Combinations that can't work, each as a sentence that begins with the key to change."""
    problems = []
    longest_bytes = settings.max_model_len * BYTES_PER_ID
    for name, num_bytes in (
        ("ingest.arena_bytes", settings.ingest.arena_bytes),
        ("schedule.arena_bytes", settings.schedule.arena_bytes),
    ):
        if num_bytes < longest_bytes:
            problems.append(
                f"{name}: needs at least {longest_bytes} to hold the ids of one prompt of "
                f"max_model_len = {settings.max_model_len} tokens, got {num_bytes}"
            )
    problems += hf_overrides.problems_of(settings.hf_overrides)
    problems += _key_problems(settings)
    problems += _gateway_problems(settings)
    problems += _arithmetic_problems(settings)
    problems += _speculation_problems(settings)
    problems += _rank_problems(settings)
    problems += _host_problems(settings)
    if settings.lora.max_cpu_loras and settings.lora.max_cpu_loras < settings.lora.max_loras:
        problems.append(
            f"lora.max_cpu_loras: {settings.lora.max_cpu_loras} is less than lora.max_loras = {settings.lora.max_loras}"
        )
    problems += _name_problems(settings)
    return problems + _swap_problems(settings)


def _gateway_problems(settings: Settings) -> list[str]:
    gateway = settings.gateway
    shared = {"max_open_sequences": 1, "max_open_tokens": 1, "max_open_bytes": MIN_OPEN_BYTES}
    shared["max_open_media_bytes"] = MIN_OPEN_BYTES
    problems = [
        f"gateway.replicas: {gateway.replicas} gateways share gateway.{key} = {getattr(gateway, key)} equally, and "
        f"each needs {least} at least"
        for key, least in shared.items()
        if gateway.replicas * least > getattr(gateway, key)
    ]
    if problem := zmq_setting.problem_of(gateway.zmq):
        problems.append(problem)
    if problem := otlp.problem_of(gateway.otlp_traces_endpoint):
        problems.append(problem)
    problems += browsers.problems_of(gateway.allowed_hosts, gateway.allowed_origins, gateway.allowed_media_domains)
    problems += browsers.cors_problems(gateway.allowed_methods, gateway.allowed_headers)
    for key, path in (("ssl_keyfile", gateway.ssl_keyfile), ("ssl_ca_certs", gateway.ssl_ca_certs)):
        if path and not gateway.ssl_certfile:
            problems.append(f"gateway.{key}: needs the server's certificate in gateway.ssl_certfile")
    return problems


def _arithmetic_problems(settings: Settings) -> list[str]:
    """What the kernels of a device don't compute."""
    execute, problems = settings.execute, []
    if execute.device == "cuda" and execute.kernels != "auto":
        problems.append(
            f"execute.kernels: {execute.kernels!r} computes on a CPU, and execute.device is 'cuda': leave it at 'auto'"
        )
    elif execute.kernels not in ("auto", "torch") and execute.dtype != "bfloat16":
        problems.append(
            f"execute.kernels: {execute.kernels!r} computes with bfloat16, and execute.dtype is {execute.dtype!r}: "
            "'torch' computes with both"
        )
    if settings.quantization in ("int8", "int4") and execute.device == "cpu":
        problems.append(
            f"quantization: {settings.quantization!r} is made while the weights of a GPU are loaded, and "
            "execute.device is 'cpu': 'q8_0' and 'q4_1' are 8 and 4 bits there"
        )
    return problems


def _swap_problems(settings: Settings) -> list[str]:
    execute, problems = settings.execute, []
    if settings.schedule.preemption == "swap" and not execute.swap_bytes:
        problems.append("schedule.preemption: 'swap' needs execute.swap_bytes above 0")
    if execute.swap_dir and not Path(execute.swap_dir).is_dir():
        problems.append(f"execute.swap_dir: must be an existing folder, got {execute.swap_dir!r}")
    return problems


def _name_problems(settings: Settings) -> list[str]:
    """Names for clients that would mean two things."""
    problems = []
    names = {settings.served_model_name, *settings.aliases}
    if settings.served_model_name in settings.aliases or len(set(settings.aliases)) < len(settings.aliases):
        problems.append("aliases: each must be another name than served_model_name and the others")
    if "" in settings.aliases:
        problems.append("aliases: a name must not be empty")
    if any(not name or name in names for name in settings.lora.adapters):
        problems.append("lora.adapters: a name must not be empty, nor that of the model")
    return problems


def _key_problems(settings: Settings) -> list[str]:
    problems = []
    names = [one.name for one in settings.keys]
    for index, one in enumerate(settings.keys):
        where = f"keys: entry {index}, {one.name!r}"
        if not (one.digest or one.file):
            problems.append(f"{where}: needs digest, the key's SHA-256, or file, which has the key")
        if names.index(one.name) < index:
            problems.append(f"{where}: an entry before it has the same name")
        if UNNAMED_KEY.fullmatch(one.name):
            problems.append(f"{where}: keys without a name are called so; choose another name")
    return problems


def _rank_problems(settings: Settings) -> list[str]:
    execute = settings.execute
    problems = []
    num_stages, layers = execute.pipeline_parallel, execute.pipeline_layers
    if layers and len(layers) != num_stages:
        problems.append(
            f"execute.pipeline_layers: needs a number for each stage, and execute.pipeline_parallel is {num_stages}: "
            f"got {len(layers)} numbers"
        )
    depth = settings.schedule.max_steps_in_flight
    if isinstance(depth, int) and 0 < depth < num_stages:
        problems.append(
            f"schedule.max_steps_in_flight: is {depth}, but execute.pipeline_parallel is {num_stages}, and each stage "
            "needs a step: choose 0"
        )
    if execute.cores and execute.device == "cuda":
        problems.append("execute.cores: has a meaning only if execute.device is 'cpu'")
    if execute.all_reduce != "nccl" and (execute.device == "cpu" or execute.tensor_parallel == 1):
        problems.append(
            f"execute.all_reduce: {execute.all_reduce!r} has a meaning only if execute.device is 'cuda' and "
            "execute.tensor_parallel is above 1"
        )
    if execute.cores and len(execute.cores) != execute.num_ranks:
        of_stages = f" times execute.pipeline_parallel is {execute.num_ranks}" if num_stages > 1 else ""
        problems.append(
            "execute.cores: needs an entry for each rank, and execute.tensor_parallel"
            f"{of_stages or f' is {execute.num_ranks}'}: got {len(execute.cores)} entries"
        )
    for entry in execute.cores:
        try:
            core_list.parse(entry)
        except ValueError as error:
            problems.append(f"execute.cores: {error}")
    if execute.num_ranks == 1:
        return problems
    key = "tensor_parallel" if execute.tensor_parallel > 1 else "pipeline_parallel"
    on_cpu = execute.device == "cpu"
    if num_stages > 1 and not on_cpu:
        problems.append(
            f"execute.pipeline_parallel: is {num_stages}, but execute.device is 'cuda': a pipeline's stages need CPUs"
        )
    refused = (
        (on_cpu and execute.kernels == "torch", "execute.kernels is 'torch': ranks need the CPU library"),
        (
            on_cpu and execute.dtype != "bfloat16",
            f"execute.dtype is {execute.dtype!r}: ranks on CPUs compute with bfloat16",
        ),
        (settings.lora.is_on, "LoRA adapters are not supported with ranks"),
        (
            settings.speculative.method != "none",
            f"speculative.method is {settings.speculative.method!r}: speculative decoding is not supported with ranks",
        ),
    )
    return problems + [f"execute.{key}: is {getattr(execute, key)}, but {why}" for holds, why in refused if holds]


def _host_problems(settings: Settings) -> list[str]:
    transport, problems = settings.transport, []
    try:
        ipaddress.ip_address(transport.host)
    except ValueError:
        problems.append(f"transport.host: must be an IP address of this machine, got {transport.host!r}")
    try:
        port_range.parse(transport.ports)
    except ValueError as error:
        problems.append(f"transport.ports: {error}")
    if settings.execute.launcher == "process":
        return problems
    refused = (
        (settings.execute.swap_bytes > 0, "execute.swap_bytes: swap space"),
        (settings.lora.is_on, "lora.adapters: LoRA adapters"),
        (settings.execute.pipeline_parallel > 1, "execute.pipeline_parallel: several pipeline stages"),
    )
    return problems + [
        f"{what} can't be used with execute.launcher = {settings.execute.launcher!r}"
        for holds, what in refused
        if holds
    ]


def _speculation_problems(settings: Settings) -> list[str]:
    speculative = settings.speculative
    problems = []
    has_draft = speculative.method in ("draft_model", "eagle")
    if speculative.draft and not has_draft:
        problems.append(
            f"speculative.draft: needs speculative.method = 'draft_model' or 'eagle', and that is "
            f"{speculative.method!r}"
        )
    if speculative.method == "none":
        return problems
    if has_draft and not speculative.draft:
        problems.append(f"speculative.draft: {speculative.method!r} in speculative.method needs a model here")
    if speculative.prompt_lookup_min > speculative.prompt_lookup_max:
        problems.append(
            f"speculative.prompt_lookup_min: {speculative.prompt_lookup_min} is more than "
            f"speculative.prompt_lookup_max = {speculative.prompt_lookup_max}"
        )
    return problems


def remarks(settings: Settings) -> list[str]:
    """Options that work but do not what they seem to, each as a sentence that begins with the key."""
    found = []
    schedule, execute = settings.schedule, settings.execute
    if schedule.max_num_seqs > schedule.max_num_batched_tokens:
        found.append(
            f"schedule.max_num_seqs: a step computes schedule.max_num_batched_tokens = "
            f"{schedule.max_num_batched_tokens} tokens, so not all of {schedule.max_num_seqs} sequences "
            f"advance in each step"
        )
    if schedule.policy == "longest-prefix-match" and not schedule.prefix_caching:
        found.append("schedule.policy: 'longest-prefix-match' finds nothing without schedule.prefix_caching")
    if execute.swap_bytes and schedule.preemption == "recompute" and not schedule.kv_offload:
        found.append(
            "execute.swap_bytes: schedule.preemption is 'recompute' and schedule.kv_offload is false, so nothing is "
            "copied there"
        )
    if schedule.max_step_ms and schedule.max_step_ms < 1:
        found.append("schedule.max_step_ms: the unit is milliseconds, and few steps take less than one")
    if execute.gpu_memory_utilization != ExecuteSettings().gpu_memory_utilization:
        if execute.device == "cpu":
            found.append("execute.gpu_memory_utilization: has no effect, as execute.device is 'cpu'")
        elif execute.kv_cache_bytes:
            found.append(
                "execute.gpu_memory_utilization: has no effect, as execute.kv_cache_bytes is "
                f"{execute.kv_cache_bytes}; 0 takes what the share leaves"
            )
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_threads = max(1, execute.num_threads) * execute.num_ranks
    # The stages of a pipeline may share the cores: with one sequence, one of them computes at a time.
    if max(execute.num_threads * execute.tensor_parallel, execute.num_ranks) > num_cores:
        of_ranks = f" of {execute.num_ranks} ranks" if execute.num_ranks > 1 else ""
        parallel = "tensor_parallel" if execute.tensor_parallel > 1 else "pipeline_parallel"
        key, least = ("num_threads", "; 0 takes one per core") if execute.num_threads else (parallel, "")
        found.append(f"execute.{key}: {num_threads} threads{of_ranks} would share {num_cores} cores{least}")
    if execute.num_ranks > 1 and 0 < settings.supervisor.hang_timeout_s <= execute.barrier_timeout_s:
        found.append(
            "execute.barrier_timeout_s: is not shorter than supervisor.hang_timeout_s, so a rank that hangs may be "
            "killed before the others have named it"
        )
    if (
        keys_in := "gateway.api_keys_file has"
        if settings.gateway.api_keys_file
        else "keys has"
        if settings.keys
        else ""
    ):
        if settings.gateway.allow_unauthenticated:
            found.append(f"gateway.allow_unauthenticated: has no effect, as {keys_in} API keys")
        if settings.gateway.allowed_hosts and settings.gateway.admin_port < 0:
            found.append(f"gateway.allowed_hosts: has no effect, as {keys_in} API keys")
    if settings.gateway.allow_credentials and not settings.gateway.allowed_origins:
        found.append("gateway.allow_credentials: has no effect, as gateway.allowed_origins is empty")
    if settings.supervisor.health_timeout_s > settings.supervisor.start_timeout_s:
        found.append("supervisor.health_timeout_s: is longer than supervisor.start_timeout_s")
    return found
