"""What is not supported yet for models with recurrent layers, for those whose layers have different sizes, and for
those with dense layers beside experts."""

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
    ranks = {key: getattr(execute, key) for key in ("tensor_parallel", "pipeline_parallel")}
    problems = {**{f"execute.{key}": (num, num > 1) for key, num in ranks.items()}, **adapters}
    if config.differs_by_layer:
        _refuse(config, "its layers have different sizes", problems)
    if config.experts is not None and config.experts.beside_dense:
        _refuse(config, "its layers have a dense feed-forward layer beside experts", problems)


def _refuse(config: ModelConfig, why: str, problems: dict[str, tuple[object, bool]]) -> None:
    for key, (value, is_set) in problems.items():
        if is_set:
            raise UserError(
                f"{key} is {value!r}, which is not supported for {config.name} ({config.architecture}): {why}"
            )
