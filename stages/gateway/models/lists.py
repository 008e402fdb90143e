"""What the server says about its models: /v1/models and /models, /api/tags, /api/ps, /health."""

from typing import Any

import msgspec

from pipeline.stages.gateway.admin.health import HealthBody
from pipeline.stages.gateway.apis.ollama import models as ollama
from pipeline.stages.gateway.apis.ollama.reply import rfc3339
from pipeline.stages.gateway.apis.ollama.types import OllamaModel, OllamaModelDetails, OllamaRunningModel
from pipeline.stages.gateway.models.table import ModelEntry


def card_of(model: ModelEntry, created: int, waits_for: list[str]) -> dict[str, Any]:
    """An entry of /v1/models: OpenAI's, vLLM's if it is loaded, and llama.cpp's `status`. `waits_for` are the models
    that it waits for and that the client may use."""
    card: dict[str, Any] = {"id": model.name, "object": "model", "created": created, "owned_by": "pipeline"}
    if model.serves:
        assert model.gateway is not None
        card |= msgspec.to_builtins(model.gateway.api.server.card())
    return card | {"aliases": list(model.status.aliases), "status": status_of(model, waits_for)}


def adapter_cards(model: ModelEntry, card: dict[str, Any]) -> list[dict[str, Any]]:
    """The entries of the adapters of a model that is loaded."""
    if model.gateway is None:
        return []
    adapters = model.gateway.limits.adapters.values()
    return [card | {"id": one.name, "root": one.path, "parent": model.name, "aliases": []} for one in adapters]


def status_of(model: ModelEntry, waits_for: list[str]) -> dict[str, Any]:
    """The state, in `value` as in llama.cpp's router, and what is behind it. `waits_for` are the models that may be
    named."""
    status = model.status
    found: dict[str, Any] = {"value": model.state, "since": round(status.since_s, 3)}
    if status.state == "failed":
        found |= {"failed": True}
    if status.problem:
        found["problem"] = status.problem
    if status.position:
        found |= {"position": status.position, "waits_for": waits_for}
        found |= {"waits_since": round(status.waits_since_s, 3)}
    if status.num_bytes:
        found["memory_bytes"] = status.num_bytes
    if status.is_pinned:
        found["pinned"] = True
    if status.expires_s:
        found["expires"] = status.expires_s
    return found


async def tag_of(model: ModelEntry, started_s: float) -> OllamaModel:
    """An entry of /api/tags."""
    if model.serves:
        assert model.gateway is not None
        served = model.gateway.served_model
        return ollama.listed(served, await served.weight_facts(), model.name, started_s)
    name = ollama.tagged(model.name)
    details = OllamaModelDetails(format="", family="", families=[], parameter_size="", quantization_level="")
    return OllamaModel(name=name, model=name, modified_at=rfc3339(started_s), size=0, digest="", details=details)


async def running_of(model: ModelEntry) -> OllamaRunningModel:
    """An entry of /api/ps, of a model that serves."""
    gateway = model.gateway
    assert gateway is not None and gateway.readiness.facts is not None
    served = gateway.served_model
    found = ollama.running(served, await served.weight_facts(), model.name, gateway.readiness.facts.max_model_len)
    if model.status.expires_s:
        found = msgspec.structs.replace(found, expires_at=rfc3339(model.status.expires_s))
    return found


def health_of(model: ModelEntry, body: HealthBody | None) -> dict[str, Any]:
    """An entry of /health. `body` is what the server of this model alone would answer, if it serves. Anybody may read
    it, so it does not say why a model failed, which may name files."""
    found = {"name": model.name, "state": model.state} | status_of(model, list(model.status.waits_for))
    for name in ("value", "problem"):
        found.pop(name, None)
    return found if body is None else found | {"health": msgspec.to_builtins(body)}
