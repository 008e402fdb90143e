"""What a running server does with changed settings: `pipeline reload`.

    the supervisor's own settings ──► used at once
    a stage's settings            ──► this stage is restarted on purpose (restart/planned_restarts.py)
    the number of its processes   ──► some are added or removed (scaling.py)
    the others                    ──► refused: they need a new server

Restarts of stages are so short that no setting of theirs needs another way.
"""

from typing import Any

import msgspec

from pipeline.config.keys import sections
from pipeline.config.settings import Settings
from pipeline.runtime.topology import SCALABLE

CPU_STAGES = ("detokenize", "ingest", "schedule")
ALL = (*CPU_STAGES, "execute", "gateway")
"""In the order in which they are restarted: the gateways last, because they end their streams first."""
LIVE: tuple[str, ...] = ()

SECTIONS: dict[str, tuple[str, ...]] = {
    "gateway": ("gateway",),
    "ingest": ("ingest",),
    "schedule": ("schedule",),
    "execute": ("execute",),
    "detokenize": ("detokenize",),
    "supervisor": LIVE,
    "limits": ("gateway",),
    "chat": ("detokenize", "ingest", "gateway"),
    "speculative": ("execute",),
    "lora": ("gateway",),
    "ray": LIVE,
    "transport": LIVE,
    "access_log": ("gateway",),
}
"""The stages that use a section."""
KEYS: dict[str, tuple[str, ...]] = {
    "served_model_name": ("gateway",),
    "aliases": ("gateway",),
    "generation_config": ("ingest", "gateway"),
    "keys": LIVE,
    "gateway.api_keys_file": LIVE,
    "log_level": ALL,
    "log_format": ALL,
    "schedule.policy": ("schedule", "gateway"),
    "detokenize.replicas": LIVE,
    "ingest.replicas": LIVE,
    "gateway.replicas": LIVE,
    "limits.max_logprobs": ("execute", "gateway"),
    "limits.max_stop_token_ids": ("execute", "gateway"),
    "limits.max_prompt_bytes": ("ingest", "gateway"),
    "limits.max_grammar_bytes": ("ingest", "gateway"),
    "limits.template_timeout_s": ("ingest",),
    "limits.grammar_timeout_s": ("ingest", "execute"),
    "speculative.adaptive": ("schedule",),
}
"""Exceptions from `SECTIONS`, and keys that belong to none."""
NEW_SERVER = {
    "model": "another model",
    "memory_bytes": "it is used at the start only",
    "swap_quantum_s": "it is used at the start only",
    "pinned": "it is used at the start only",
    "load_at_start": "it is used at the start only",
    "idle_unload_s": "it is used at the start only",
    "max_model_len": "all stages and the KV cache are made for it",
    "quantization": "another model",
    "hf_overrides": "another model",
    "chat_template": "the prepared model has it",
    "cache_dir": "the prepared model is in it",
    "gateway.host": "the listening sockets are fixed",
    "gateway.port": "the listening sockets are fixed",
    "gateway.zmq": "the listening sockets are fixed",
    "gateway.admin_host": "the listening sockets are fixed",
    "gateway.admin_port": "the listening sockets are fixed",
    "gateway.allow_unauthenticated": "it is checked at the start",
    "schedule.max_num_seqs": "the memory of schedule and execute is made for it",
    "schedule.max_num_batched_tokens": "the memory of schedule and execute is made for it",
    "schedule.max_num_prefill_tokens": "the memory of schedule and execute is made for it",
    "schedule.block_size": "the KV cache is made of such blocks",
    "execute.device": "another executor",
    "execute.dtype": "another model",
    "execute.kernels": "open streams would continue with other numbers",
    "execute.activations": "open streams would continue with other numbers",
    "execute.kv_dtype": "the number of KV blocks is fixed",
    "execute.hybrid_kv_cache_manager": "the number of KV blocks is fixed",
    "execute.kv_cache_bytes": "the number of KV blocks is fixed",
    "execute.gpu_memory_utilization": "the number of KV blocks is fixed",
    "execute.swap_bytes": "swap space is reserved at the start",
    "execute.swap_dir": "the file is opened at the start",
    "execute.tensor_parallel": "each rank has a part of the KV cache",
    "execute.pipeline_parallel": "each rank has a part of the KV cache",
    "execute.pipeline_layers": "each rank has a part of the KV cache",
    "execute.launcher": "the executor's channels are made for it",
    "ray.address": "the executor runs there",
    "ray.bundle_cpus": "they are reserved at the start",
    "transport.host": "the listening sockets are fixed",
    "transport.ports": "the listening sockets are fixed",
    "speculative.method": "the memory of execute is made for it",
    "speculative.draft": "the model is prepared at the start",
    "speculative.num_speculative_tokens": "the memory of execute is made for it",
    "lora.adapters": "adapters are prepared at the start; POST /v1/load_lora_adapter adds others",
    "lora.max_cpu_loras": "the memory of execute is made for it",
    "lora.max_lora_rank": "the memory of execute is made for it",
    "lora.max_loras": "the memory of execute is made for it",
    "lora.runtime_loading": "the memory of execute is made for it",
    "supervisor.prepare_timeout_s": "it is used at the start only",
    "supervisor.crash_reports": "it is used at the start only",
    "supervisor.crash_recording_bytes": "it is used at the start only",
    "supervisor.record_first_processes": "it is used at the start only",
}
"""Keys that can't change while a server runs, and why."""
RAISED = ("gateway.max_open_sequences", "gateway.max_open_tokens")
"""Limits that can be lowered only: the queues between the stages are made for them."""


class Change(msgspec.Struct, frozen=True):
    """One setting that differs."""

    key: str
    before: Any
    after: Any
    stages: tuple[str, ...] = ()
    """Those that are restarted."""
    refusal: str = ""
    """Why it can't change; else empty."""

    @property
    def scales(self) -> str:
        """The stage whose number of processes this is; else empty."""
        section, _, name = self.key.partition(".")
        return section if name == "replicas" and section in SCALABLE else ""


def changes(before: Settings, after: Settings) -> list[Change]:
    """The settings that differ, in the order of the tree."""
    found = []
    for section in sections():
        for key in section.keys:
            old, new = _value(before, key.dotted), _value(after, key.dotted)
            if old != new:
                refusal = _refusal(key.dotted, old, new)
                stages = () if refusal else stages_of(key.dotted)
                found.append(Change(key.dotted, _shown(old), _shown(new), stages, refusal))
    return found


def stages_of(key: str) -> tuple[str, ...]:
    """The stages that use a setting that can change. Raises KeyError for an unknown one."""
    return KEYS[key] if key in KEYS else SECTIONS[key.partition(".")[0]]


def to_restart(changed: list[Change]) -> list[str]:
    """The stages that are restarted for these changes, in order."""
    wanted = {stage for one in changed for stage in one.stages}
    return [stage for stage in ALL if stage in wanted]


def to_scale(changed: list[Change]) -> list[tuple[str, int]]:
    """The stages whose number of processes changes, with the new number, in order."""
    nums = {one.scales: one.after for one in changed if one.scales}
    return [(stage, nums[stage]) for stage in SCALABLE if stage in nums]


def _refusal(key: str, old: Any, new: Any) -> str:
    if key in RAISED and new > old:
        return "it can only be lowered: the queues between the stages are made for it"
    return NEW_SERVER.get(key, "")


def _shown(value: Any) -> Any:
    """A value for `Change`. Of `[[keys]]`, only the names."""
    if isinstance(value, tuple) and value and isinstance(value[0], msgspec.Struct):
        return [getattr(one, "name", "") for one in value]
    return value


def _value(settings: Settings, dotted: str) -> Any:
    value: Any = settings
    for name in dotted.split("."):
        value = getattr(value, name)
    return value
