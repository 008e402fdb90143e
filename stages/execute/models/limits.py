"""What is not supported yet for models with recurrent layers, and for those whose layers have different sizes."""

from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.runtime.model.model_config import ModelConfig


def require_supported(settings: Settings, config: ModelConfig) -> None:
    """Raise UserError if a setting does not work with the layers of a model."""
    execute, lora = settings.execute, settings.lora
    adapters = {
        "lora.adapters": (list(lora.adapters), bool(lora.adapters)),
        "lora.runtime_loading": (lora.runtime_loading, lora.runtime_loading),
    }
    if config.has_states:
        method = settings.speculative.method
        _refuse(config, "it has recurrent layers", {"speculative.method": (method, method != "none"), **adapters})
    if config.differs_by_layer:
        ranks = {key: getattr(execute, key) for key in ("tensor_parallel", "pipeline_parallel")}
        problems = {f"execute.{key}": (num, num > 1) for key, num in ranks.items()}
        _refuse(config, "its layers have different sizes", {**problems, **adapters})


def _refuse(config: ModelConfig, why: str, problems: dict[str, tuple[object, bool]]) -> None:
    for key, (value, is_set) in problems.items():
        if is_set:
            raise UserError(
                f"{key} is {value!r}, which is not supported for {config.name} ({config.architecture}): {why}"
            )
