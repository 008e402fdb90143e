"""Prepares the EAGLE head of speculative decoding: its weights stay in place, and their names and sizes are checked.

Checkpoints are folders as vLLM and SGLang read them: config.json describes the head's layers, and the tensors are
`fc.weight` [hidden_size, 2 * hidden_size] and those of `layers.0`, `layers.1` …, by Llama's names.
"""

import hashlib
from pathlib import Path

import msgspec

from pipeline.config.settings import Settings
from pipeline.runtime.model_folder import Layout, ModelConfig
from pipeline.stages.prepare.cache import Cache
from pipeline.stages.prepare.files import MAX_JSON_BYTES, decode_json
from pipeline.stages.prepare.progress import Progress
from pipeline.stages.prepare.sources.config_json import ConfigReader
from pipeline.stages.prepare.sources.folder import state
from pipeline.stages.prepare.sources.layout import weight_files
from pipeline.stages.prepare.sources.source import FolderSource, ModelError, parse
from pipeline.stages.prepare.tensors import find_tensors

FORMAT = 1
KEY = "speculative.draft"
PREFIX = "model."
CLASSES = {"EagleLlamaForCausalLM": "LlamaForCausalLM", "EAGLEModel": "LlamaForCausalLM"}
"""Names that exporters of heads use in config.json, for the layers' own."""


def prepare_head(settings: Settings, model: Path, progress: Progress) -> Path:
    """The prepared folder of the head in `speculative.draft`, for the prepared folder of the model. Raises ModelError
    if the head does not fit."""
    source = parse(settings.speculative.draft)
    if not isinstance(source, FolderSource):
        raise ModelError(f"{KEY}: an EAGLE head must be a folder with config.json and *.safetensors")
    folder = source.path
    target = ModelConfig.load(model)
    identity = f"{FORMAT}|{model}|{folder}|{state(folder)}"
    key = f"eagle-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"

    def fill(prepared: Path) -> None:
        _convert(folder, target).save(prepared)

    return Cache.of(settings).ensure(key, str(folder), fill, progress.say, settings.supervisor.prepare_timeout_s)


def _convert(folder: Path, target: ModelConfig) -> ModelConfig:
    path = folder / "config.json"
    fields = decode_json(path, MAX_JSON_BYTES, dict[str, object])
    classes = fields.get("architectures")
    if isinstance(classes, list) and classes and classes[0] in CLASSES:
        fields["architectures"] = [CLASSES[classes[0]]]
    files = weight_files(folder)
    config = ConfigReader(path, fields).model(folder.name, files, {})
    tensors = find_tensors(files)
    prefix = PREFIX if any(name.startswith(f"{PREFIX}layers.") for name in tensors) else ""
    if "d2t" in tensors or any("midlayer." in name for name in tensors):
        raise ModelError(f"{KEY}: {folder} is an EAGLE-3 head, which is not supported: choose an EAGLE or EAGLE-2 head")
    for field in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(target, field), getattr(config, field)
        if ours != theirs:
            raise ModelError(
                f"{KEY}: {path} has {field} {theirs}, and the model's is {ours}: the head is of another model"
            )
    for field in ("parallel", "post_norms"):
        if getattr(config, field):
            raise ModelError(f"{KEY}: the layers of an EAGLE head must be like Llama's, not like those of {path}")
    if config.norm != "rms" or config.experts is not None or not config.pre_norms or config.qk_norm:
        raise ModelError(f"{KEY}: the layers of an EAGLE head must be like Llama's, not like those of {path}")
    if "fc.weight" not in tensors:
        raise ModelError(f"{KEY}: {folder} lacks the tensor fc.weight of an EAGLE head")
    if f"{prefix}layers.0.input_layernorm.weight" in tensors:
        raise ModelError(f"{KEY}: {folder} has a norm before its first layer, which EAGLE heads have not")
    layout = config.layout if prefix else Layout("layers.{}.", config.layout.pieces, config.layout.experts)
    return msgspec.structs.replace(config, layout=layout, tie_embeddings=True)
