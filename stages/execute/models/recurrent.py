"""What is not supported yet for models with recurrent layers."""

from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.runtime.model.model_config import ModelConfig


def require_supported(settings: Settings, config: ModelConfig) -> None:
    """Raise UserError if a model has recurrent layers, and a setting does not work with them."""
    if not config.has_states:
        return
    problems = {
        "speculative.method": (settings.speculative.method, settings.speculative.method != "none"),
        "lora.adapters": (list(settings.lora.adapters), bool(settings.lora.adapters)),
        "lora.runtime_loading": (settings.lora.runtime_loading, settings.lora.runtime_loading),
    }
    for key, (value, is_set) in problems.items():
        if is_set:
            raise UserError(
                f"{key} is {value!r}, which is not supported for {config.name} ({config.architecture}): it has "
                "recurrent layers"
            )
