"""Prepares the LoRA adapters that the server starts with: `lora.adapters`."""

from pathlib import Path

from pipeline.config.settings import Settings
from pipeline.lora.convert import convert, dtype_of
from pipeline.lora.peft_config import AdapterError
from pipeline.runtime.messages import Adapter
from pipeline.stages.prepare.progress import Progress


def prepare(settings: Settings, model_dir: Path, model_name: str, progress: Progress) -> list[Adapter]:
    """Convert each adapter for the prepared model in `model_dir`, or find its file. Raises AdapterError."""
    adapters = []
    for name, path in settings.lora.adapters.items():
        if name == model_name:
            raise AdapterError(f"lora.adapters: {name!r} is the name of the model itself")
        folder = Path(path).expanduser().absolute()
        with progress.measure(f"adapter {name}"):
            try:
                adapter_id = convert(folder, model_dir, dtype_of(settings), settings.lora.max_lora_rank)
            except AdapterError as error:
                raise AdapterError(f"lora.adapters.{name}: {error}") from error
        adapters.append(Adapter(name, adapter_id, str(folder)))
    return adapters
