"""Whether a server can take images for a prepared model."""

import functools
import importlib.util
from pathlib import Path

from pipeline.config.settings import Settings
from pipeline.media import config as media
from pipeline.runtime.model.vision_config import VisionConfig

TEXT_ONLY = "this model reads text only"


@functools.cache
def has_pillow() -> bool:
    """Whether the extra `media` is installed. It is not imported here."""
    return importlib.util.find_spec("PIL") is not None


def encodes(settings: Settings, folder: Path) -> bool:
    """Whether the executor has the tower of the model in a prepared folder, and memory for its rows."""
    are_on = settings.execute.encoder_cache_bytes > 0 and settings.limits.max_images > 0
    return settings.execute.device == "cpu" and are_on and not why_not(folder)


def why_not(folder: Path) -> str:
    """Why requests for the model in a prepared folder can't have images, whatever the settings are; empty if they can.
    The words follow "it is an image, and"."""
    if media.load(folder) is None or VisionConfig.load(folder) is None:
        return TEXT_ONLY
    if not has_pillow():
        return "this server was installed without the extra 'media' (Pillow), which decodes images"
    return ""


def max_whole_run(folder: Path) -> int:
    """The most positions of the model in a prepared folder that see each other, so that one step computes them; 0 if
    all positions see only what is before them."""
    config = media.load(folder)
    return config.num_rows if isinstance(config, media.Gemma3) else 0
