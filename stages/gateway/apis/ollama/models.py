"""What Ollama's API says about the served model: /api/tags, /api/ps, /api/show."""

from typing import Any

from pipeline.runtime.model.weight_headers import WeightFacts
from pipeline.stages.gateway.admin.served_model import ServedModel
from pipeline.stages.gateway.apis.ollama.bodies import TAG
from pipeline.stages.gateway.apis.ollama.reply import rfc3339
from pipeline.stages.gateway.apis.ollama.types import (
    OllamaModel,
    OllamaModelDetails,
    OllamaRunningModel,
    OllamaShowReply,
)
from pipeline.stages.gateway.parsing.fill_in import find_fill_in_tokens

NEVER = "9999-12-31T23:59:59Z"
"""When a model that stays loaded expires."""
UNITS = ((10**9, "B"), (10**6, "M"), (10**3, "K"))


def tagged(name: str) -> str:
    """The model's name in lists: with a tag, as Ollama's clients look it up."""
    return name if ":" in name else name + TAG


def listed(model: ServedModel, facts: WeightFacts, name: str, started_s: float) -> OllamaModel:
    """The model in /api/tags."""
    return OllamaModel(
        name=tagged(name),
        model=tagged(name),
        modified_at=rfc3339(started_s),
        size=facts.num_bytes,
        digest=model.digest,
        details=_details(model, facts),
    )


def running(model: ServedModel, facts: WeightFacts, name: str, max_model_len: int) -> OllamaRunningModel:
    """The model in /api/ps."""
    return OllamaRunningModel(
        name=tagged(name),
        model=tagged(name),
        size=facts.num_bytes,
        digest=model.digest,
        details=_details(model, facts),
        expires_at=NEVER,
        size_vram=facts.num_bytes if model.is_on_gpu else 0,
        context_length=max_model_len,
    )


def shown_model(model: ServedModel, facts: WeightFacts, started_s: float, *, takes_images: bool) -> OllamaShowReply:
    """The response of /api/show."""
    return OllamaShowReply(
        template=model.formats.template,
        details=_details(model, facts),
        model_info=_info(model, facts),
        capabilities=_capabilities(model, takes_images=takes_images),
        modified_at=rfc3339(started_s),
    )


def unloaded(path: str, name: str, now_s: float) -> dict[str, Any]:
    """Ollama's answer to a request to unload a model that is not loaded."""
    found: dict[str, Any] = {"model": name, "created_at": rfc3339(now_s), "done": True, "done_reason": "unload"}
    if path == "/api/chat":
        return found | {"message": {"role": "assistant", "content": ""}}
    return found | {"response": ""}


def _details(model: ServedModel, facts: WeightFacts) -> OllamaModelDetails:
    family = model.config.architecture
    return OllamaModelDetails(
        format="gguf" if facts.has_gguf_blocks else "safetensors",
        family=family,
        families=[family],
        parameter_size=_short(facts.num_parameters),
        quantization_level=facts.format,
    )


def _short(number: int) -> str:
    """Such as 134.5M."""
    for size, unit in UNITS:
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)


def _info(model: ServedModel, facts: WeightFacts) -> dict[str, Any]:
    config = model.config
    family: dict[str, Any] = {
        "context_length": config.max_position,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_theta,
        "vocab_size": config.vocab_size,
    }
    if (experts := config.experts) is not None:
        family |= {
            "expert_count": experts.num,
            "expert_used_count": experts.num_per_token,
            "expert_feed_forward_length": experts.intermediate_size,
        }
    return {
        "general.architecture": config.architecture,
        "general.basename": config.name,
        "general.parameter_count": facts.num_parameters,
    } | {f"{config.architecture}.{name}": value for name, value in family.items()}


def _capabilities(model: ServedModel, *, takes_images: bool) -> list[str]:
    formats = model.formats
    found = {
        "completion": "generate" in model.config.tasks,
        "embedding": "embed" in model.config.tasks and not model.config.generates,
        "vision": takes_images,
        "tools": formats.tools is not None,
        "thinking": formats.reasoning is not None,
        "insert": find_fill_in_tokens(formats.added) is not None,
    }
    return [name for name, has_it in found.items() if has_it]
