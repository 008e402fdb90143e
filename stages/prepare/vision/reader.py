"""Reads the vision tower of a folder in Hugging Face layout."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from pipeline.media.config import MediaConfig
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.vision_config import VisionConfig
from pipeline.stages.prepare.families.keys import ConfigFault, Keys
from pipeline.stages.prepare.files import shown
from pipeline.stages.prepare.shape import check_shape
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.vision.families import FAMILIES
from pipeline.stages.prepare.vision.tensors import missing_tensor, with_names_of
from pipeline.stages.prepare.vision.tower_source import NAMES, NotServed, Source
from pipeline.stages.prepare.weights.tensors import Found


def read(
    path: Path, config: Mapping[str, Any], text: ModelConfig, media: MediaConfig | None, found: Found
) -> tuple[VisionConfig | None, str]:
    """The vision tower of a model whose config.json is at `path`, and whose tensors are `found`; `text` is its language
    model, and `media` says how images are processed. None, with the reason, if images are not served. The reason is
    empty if the model has no tower, or no `media`, which has its own.

    Raises ModelError, naming file and key, if the files contradict each other or a value is not supported.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or media is None:
        return None, ""
    values = config.get("vision_config")
    if not isinstance(values, dict):
        raise ModelError(f"{path}: vision_config is {shown(values)}; it must be the object that describes the tower")
    try:
        vision = family(Source(Keys(config, {}, {}), values, media, text))
    except ConfigFault as fault:
        raise ModelError(f"{path}: {fault}") from fault
    except NotServed as reason:
        return None, f"images are not served: {reason}"
    check_shape(vision.encoder, path, {field: f"vision_config.{NAMES.get(field, field)}" for field in FIELDS})
    vision = with_names_of(vision, found)
    if (name := missing_tensor(vision, found)) is not None:
        return None, f"images are not served: the weights have no floats {shown(name)}"
    return vision, ""


FIELDS = ("hidden_size", "intermediate_size", "head_dim", *NAMES)


def with_files(vision: VisionConfig, found: Found, names: set[str]) -> VisionConfig:
    """The config with the weight files that have its tensors, `names`."""
    files = list(dict.fromkeys(str(path) for name, (path, _) in found.items() if name in names))
    return msgspec.structs.replace(vision, encoder=msgspec.structs.replace(vision.encoder, weight_files=files))
