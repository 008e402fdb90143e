"""The routes about the server and its model."""

from pipeline.http_server.bodies.abort_body import AbortBody, ControlBody
from pipeline.stages.gateway.admin.abort_requests import Aborted, Controlled
from pipeline.stages.gateway.admin.adapters import LoadAdapterBody, UnloadAdapterBody
from pipeline.stages.gateway.admin.health import HealthBody
from pipeline.stages.gateway.admin.live_state import LiveState
from pipeline.stages.gateway.admin.reset_prefix_cache import Reset
from pipeline.stages.gateway.admin.server_info import (
    CONFIG_FORMATS,
    ModelCard,
    ModelList,
    ServerInfo,
    ServerLoad,
    TokenizerInfo,
    Version,
)
from pipeline.stages.gateway.admin.sleep import MODE, Sleeping
from pipeline.stages.gateway.http.route import Route

ROUTES = (
    Route(
        "GET",
        "/v1/models",
        "models",
        "The model, in a list.",
        reply=ModelList,
        tag="Model",
    ),
    Route(
        "GET",
        "/v1/models/{model}",
        "model",
        "The model.",
        reply=ModelCard,
        tag="Model",
    ),
    Route(
        "GET",
        "/tokenizer_info",
        "tokenizer_info",
        "The tokenizer and the chat template.",
        reply=TokenizerInfo,
        tag="Model",
    ),
    Route(
        "POST",
        "/abort_requests",
        "abort_requests",
        "Aborts requests by their ids.",
        AbortBody,
        reply=Aborted,
        example={"request_ids": ["greece-1"]},
    ),
    *(
        Route(
            "POST",
            path,
            handler,
            "Ends the reasoning of a chat while it is generated, if it was requested with reasoning_control = true.",
            ControlBody,
            reply=Controlled,
            tag="Text",
            example={"action": "reasoning_end"} | given,
        )
        for path, handler, given in (
            ("/v1/chat/completions/control", "control_chat", {"id": "chatcmpl-5e0c"}),
            ("/v1/chat/completions/{chat_id}/control", "control_chat_by_id", {}),
        )
    ),
    Route(
        "POST",
        "/reset_prefix_cache",
        "reset_prefix_cache",
        "Drops all cached blocks of the prefix cache.",
        reply=Reset,
    ),
    Route(
        "POST",
        "/sleep",
        "sleep",
        "Ends the executor and frees its memory, if gateway.enable_sleep_mode is set. Open requests wait.",
        is_admin=True,
        queries=[
            {"name": "level", "in": "query", "description": "As in vLLM.", "schema": {"enum": [1], "default": 1}},
            {
                "name": "mode",
                "in": "query",
                "description": "As in vLLM: open requests are kept.",
                "schema": {"enum": [MODE], "default": MODE},
            },
            {
                "name": "wake_on_request",
                "in": "query",
                "description": "A new request wakes the server.",
                "schema": {"type": "boolean", "default": False},
            },
        ],
    ),
    Route(
        "POST",
        "/wake_up",
        "wake_up",
        "Starts the executor again. Open requests go on.",
        is_admin=True,
    ),
    Route(
        "GET",
        "/is_sleeping",
        "is_sleeping",
        "Whether the executor is away.",
        reply=Sleeping,
        is_admin=True,
    ),
    Route(
        "POST",
        "/v1/load_lora_adapter",
        "load_lora_adapter",
        "Loads a LoRA adapter, if lora.runtime_loading is set.",
        LoadAdapterBody,
        is_admin=True,
        example={"lora_name": "sql", "lora_path": "/adapters/sql"},
    ),
    Route(
        "POST",
        "/v1/unload_lora_adapter",
        "unload_lora_adapter",
        "Unloads a LoRA adapter, if lora.runtime_loading is set.",
        UnloadAdapterBody,
        is_admin=True,
        example={"lora_name": "sql"},
    ),
    Route(
        "GET",
        "/load",
        "load",
        "Number of open requests, and the limits.",
        reply=ServerLoad,
    ),
    Route(
        "GET",
        "/pipeline",
        "pipeline",
        "The stages, the KV cache and the latest requests.",
        reply=LiveState,
    ),
    Route(
        "GET",
        "/health",
        "health",
        "The state of each process.",
        reply=HealthBody,
        is_admin=True,
    ),
    Route(
        "GET",
        "/live",
        "live",
        "200 while the server runs, also while it recovers: for liveness probes.",
        is_admin=True,
    ),
    Route(
        "GET",
        "/ping",
        "ping",
        "200 if the server takes requests: for SageMaker.",
        is_admin=True,
    ),
    Route(
        "POST",
        "/ping",
        "post_ping",
        "As GET /ping.",
    ),
    Route(
        "GET",
        "/metrics",
        "metrics",
        "Metrics for Prometheus.",
        is_admin=True,
    ),
    Route(
        "GET",
        "/server_info",
        "server_info",
        "The settings of the server.",
        reply=ServerInfo,
        queries=[
            {
                "name": "config_format",
                "in": "query",
                "description": "text: the settings are one string, TOML.",
                "schema": {"enum": list(CONFIG_FORMATS), "default": CONFIG_FORMATS[0]},
            },
        ],
    ),
    Route(
        "GET",
        "/version",
        "version",
        "The version of the package.",
        reply=Version,
    ),
    Route(
        "GET",
        "/openapi.json",
        "openapi",
        "This API, as OpenAPI 3.1.",
    ),
    Route(
        "GET",
        "/docs",
        "docs",
        "This API, as a web page.",
    ),
)
