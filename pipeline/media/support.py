"""Whether a server can take images for a prepared model."""

from pathlib import Path

from pipeline.media import config as media
from pipeline.runtime.model.vision_config import VisionConfig

TEXT_ONLY = "this model reads text only"


def why_not(folder: Path) -> str:
    """Why requests for the model in a prepared folder can't have images; empty if they can. The words follow "it is an
    image, and"."""
    config = media.load(folder)
    if config is None or VisionConfig.load(folder) is None:
        return TEXT_ONLY
    if not config.is_causal:
        family = config.__struct_config__.tag
        return (
            f"images are not supported yet for {family} models, where the positions of an image see those behind them"
        )
    return ""
