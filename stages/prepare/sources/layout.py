"""The files of a folder in Hugging Face layout: the weights, their index, and templates."""

from pathlib import Path

import msgspec

from pipeline.stages.prepare.files import MAX_INDEX_BYTES, decode_json, find
from pipeline.stages.prepare.sources.source import ModelError

READ_SUFFIXES = (".json", ".jinja", ".model", ".safetensors", ".tiktoken", ".txt")
"""Suffixes of the files that prepare reads. Suffixes, not names: only transformers knows the names of the files that
older kinds of tokenizers consist of."""

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

TEMPLATE = "chat_template.jinja"
DEFAULT_TEMPLATE = "additional_chat_templates/default.jinja"
"""Where a tokenizer of transformers looks for its template before `TEMPLATE`."""
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
"""Where transformers saves the template for chats with tools. Other named templates are ignored."""
NAMED_TEMPLATES = (DEFAULT_TEMPLATE, TOOL_TEMPLATE)


def shards_of(index: Path) -> list[str]:
    """The files in the index of a sharded model. Raises ModelError if it isn't an index."""
    weight_map = decode_json(index, MAX_INDEX_BYTES, dict[str, msgspec.Raw]).get("weight_map", msgspec.Raw(b"null"))
    try:
        files = msgspec.json.decode(weight_map, type=dict[str, str])
    except ValueError:
        files = {}
    if not files:
        raise ModelError(f"{index}: weight_map must be an object that gives the file of each tensor")
    return sorted(set(files.values()))


def index_of(source: Path) -> Path | None:
    """The index of a folder's weights; None if model.safetensors counts, which transformers takes before an index."""
    return None if find(source, SINGLE) is not None else find(source, INDEX)


def weight_files(source: Path) -> list[Path]:
    """Absolute paths of the safetensors files: model.safetensors, else those in the index, else all.

    Raises ModelError if one of the index is missing, or all are.
    """
    if (index := index_of(source)) is not None:
        names = shards_of(index)
        paths = [find(source, name) for name in names]
        if missing := [name for name, path in zip(names, paths, strict=True) if path is None]:
            raise ModelError(
                f"{index} names {missing[0][:200]}, which is missing ({len(missing)} of {len(names)} files are missing)"
            )
        return [path.absolute() for path in paths if path is not None]
    names = [SINGLE]
    if find(source, names[0]) is None:
        names = sorted(path.name for path in source.glob("*.safetensors"))
    files = [path.absolute() for name in names if (path := find(source, name)) is not None]
    if not files:
        if others := [*source.glob("*.bin"), *source.glob("*.pth"), *source.glob("*.pt")]:
            raise ModelError(
                f"{source} has its weights in {others[0].name}, but only safetensors are supported: "
                "save the model with save_pretrained(..., safe_serialization=True)"
            )
        raise ModelError(f"{source} has no weights: *.safetensors files are missing")
    return files
