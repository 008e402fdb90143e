"""What is not supported yet for models with recurrent layers, for those whose layers have different sizes, and for
those with dense layers beside experts."""

from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.lora.supported import BESIDE_DENSE, BY_LAYER, RECURRENT, unsupported
from pipeline.runtime.model.model_config import ModelConfig


def require_supported(settings: Settings, config: ModelConfig) -> None:
    """Raise UserError if a setting does not work with the layers of a model."""
    execute, lora = settings.execute, settings.lora
    if config.has_states:
        method = settings.speculative.method
        _refuse(config, RECURRENT, {"speculative.method": (method, method != "none")})
    sizes = {key: getattr(execute, key) for key in ("tensor_parallel", "pipeline_parallel")}
    ranks = {f"execute.{key}": (num, num > 1) for key, num in sizes.items()}
    if config.differs_by_layer:
        _refuse(config, BY_LAYER, ranks)
    if config.experts is not None and config.experts.beside_dense:
        _refuse(config, BESIDE_DENSE, ranks)
    if (why := unsupported(config)) is not None:
        adapters = {
            "lora.adapters": (list(lora.adapters), bool(lora.adapters)),
            "lora.runtime_loading": (lora.runtime_loading, lora.runtime_loading),
        }
        _refuse(config, why, adapters)


def _refuse(config: ModelConfig, why: str, problems: dict[str, tuple[object, bool]]) -> None:
    for key, (value, is_set) in problems.items():
        if is_set:
            raise UserError(
                f"{key} is {value!r}, which is not supported for {config.name} ({config.architecture}): {why}"
            )
