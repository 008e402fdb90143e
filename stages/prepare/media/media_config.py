"""Reads how a model's images are processed, from the files that transformers' processors read.

    config.json                 what the model has: the size of its vision tower, the ids of its tokens
    preprocessor_config.json    sizes, filters and colors; in newer folders they are `image_processor` of the next one
    processor_config.json       how many tokens stand for an image

A model whose files say something of images that is not supported still serves texts: a note says why it reads no
images.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from pipeline.media import config as media
from pipeline.media.config import MediaConfig
from pipeline.stages.prepare.files import MAX_JSON_BYTES, decode_json, find, shown
from pipeline.stages.prepare.media.families import FAMILIES
from pipeline.stages.prepare.media.model_files import CONFIG, PREPROCESSOR, PROCESSOR, MediaFault, ModelFiles
from pipeline.stages.prepare.sources.source import ModelError

NESTED = "image_processor"


def add_to_folder(source: Path, config: Mapping[str, Any], tokenizer: Tokenizer, target: Path) -> list[str]:
    """Write `media.json` if the model of folder `source` reads images. Returns notes."""
    try:
        found = read(source, config, tokenizer)
    except ModelError as error:
        return [f"images are not read: {error}"]
    if found is not None:
        media.save(found, target)
    return []


def read(source: Path, config: Mapping[str, Any], tokenizer: Tokenizer) -> MediaConfig | None:
    """The configuration of a model for texts and images; None if it is of another kind, or has no files for images.
    Raises ModelError, naming file and key."""
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        return None
    processor = _json(source, PROCESSOR)
    if (nested := processor.get(NESTED)) is not None:
        name, image_processor = PROCESSOR, nested
        if not isinstance(nested, dict):
            raise ModelError(f"{source / PROCESSOR}: {NESTED} is {shown(nested)}; it must be an object")
    else:
        name, image_processor = PREPROCESSOR, _json(source, PREPROCESSOR)
        if not image_processor:
            return None
    files = ModelFiles(config, image_processor, processor, _json(source, "tokenizer_config.json"), tokenizer)
    names = {CONFIG: CONFIG, PREPROCESSOR: name, PROCESSOR: PROCESSOR}
    try:
        found = family(files)
    except MediaFault as fault:
        raise ModelError(f"{source / names[fault.file]}: {fault}") from fault
    try:
        msgspec.json.decode(msgspec.json.encode(found), type=type(found))
    except msgspec.ValidationError as error:
        raise ModelError(f"{source / name}: a value is out of range: {error}") from error
    return found


def _json(source: Path, name: str) -> dict[str, Any]:
    path = find(source, name)
    return {} if path is None else decode_json(path, MAX_JSON_BYTES, dict[str, Any])
