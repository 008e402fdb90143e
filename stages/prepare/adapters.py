"""Prepares the LoRA adapters that the server starts with, `lora.adapters`, and removes files of old ones."""

import time
from contextlib import suppress
from pathlib import Path

from pipeline.config.settings import Settings
from pipeline.lora.adapter_file import FOLDER
from pipeline.lora.convert import convert, dtype_of
from pipeline.lora.peft_config import AdapterError
from pipeline.own_files import OpenFolder
from pipeline.runtime.messages import Adapter
from pipeline.runtime.model.model_folder import is_held
from pipeline.stages.prepare.progress import Progress

KEEP_S = 7 * 86_400.0
"""How long files are kept after a server has last loaded them. A server that is just starting needs them, too."""


def prepare(settings: Settings, model_dir: Path, model_name: str, progress: Progress) -> list[Adapter]:
    """Convert each adapter for the prepared model in `model_dir`, or find its file. Raises AdapterError."""
    if settings.lora.is_on:
        remove_unused(model_dir)
    adapters = []
    for name, path in settings.lora.adapters.items():
        if name == model_name:
            raise AdapterError(f"lora.adapters: {name!r} is the name of the model itself")
        folder = Path(path).expanduser().absolute()
        progress.say(f"reading adapter {name} from {folder}")
        try:
            adapter_id = convert(
                folder, model_dir, dtype_of(settings), settings.lora.max_lora_rank, settings.lora.max_adapter_bytes
            )
        except AdapterError as error:
            raise AdapterError(f"lora.adapters.{name}: {error}") from error
        adapters.append(Adapter(name, adapter_id, str(folder)))
    return adapters


def remove_unused(model_dir: Path) -> None:
    """Remove files of adapters that were last loaded long ago, unless a running server uses the model."""
    if is_held(model_dir):
        return
    oldest = time.time() - KEEP_S
    with suppress(OSError), OpenFolder(model_dir / FOLDER) as folder:  # a link of another user could lead anywhere
        for path in folder.path.glob("*.lora*"):
            with suppress(OSError):  # another server removes it, or the cache may only be read
                if path.lstat().st_mtime < oldest:
                    path.unlink()
