"""Converts a folder in Hugging Face layout. Weights are read in place unless they are quantized."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from pipeline.config.settings import PreparedFormat
from pipeline.config.values import hf_overrides
from pipeline.media import config as media
from pipeline.runtime.model import generation_config
from pipeline.runtime.model.model_folder import NOTES
from pipeline.stages.prepare.encoders import pair_templates, sentence_transformers
from pipeline.stages.prepare.encoders.pooler import PoolerReader, with_pooler
from pipeline.stages.prepare.files import MAX_JSON_BYTES, decode_json, find, shown
from pipeline.stages.prepare.media import media_config
from pipeline.stages.prepare.progress import Progress
from pipeline.stages.prepare.sources import chat_templates
from pipeline.stages.prepare.sources.config_json import ConfigReader, reply_ends
from pipeline.stages.prepare.sources.layout import (
    INDEX,
    NAMED_TEMPLATES,
    READ_SUFFIXES,
    SINGLE,
    index_of,
    shards_of,
    weight_files,
)
from pipeline.stages.prepare.sources.source import ModelError, is_file
from pipeline.stages.prepare.sources.tokenizer_json import with_special_ids, write_tokenizer
from pipeline.stages.prepare.tokenizers.tokenizer_check import check_decodes
from pipeline.stages.prepare.vision import reader as tower
from pipeline.stages.prepare.vision.tensors import stored_shapes
from pipeline.stages.prepare.weights.tensor_names import with_layout_of
from pipeline.stages.prepare.weights.tensors import Found, check_tensors, find_tensors
from pipeline.stages.prepare.weights.tied_head import with_head_of
from pipeline.stages.prepare.weights.unused_tensors import ignored, rules_of

CONFIG = "config.json"
QUANTIZATION = "quantization_config"
SCORE_TOKENS = "classifier_from_token"
WEIGHTS_KEY = "transformers_weights"
"""The key of config.json with the name of another file of weights, which transformers 5 reads."""


def state(folder: Path) -> list[tuple[str, int, int]]:
    """Names, sizes and modification times of the files that `convert` reads. Raises ModelError if it can't read
    them."""
    try:
        beside = [path.name for path in folder.iterdir() if path.suffix in READ_SUFFIXES]
    except OSError as error:
        raise ModelError(f"{folder} cannot be read: {error.strerror}") from error
    named = [] if (index := index_of(folder)) is None else shards_of(index)
    for name in named:
        find(folder, name)
    names = sorted({*beside, *named, *NAMED_TEMPLATES, *sentence_transformers.extra_files(folder)})
    stats = [(name, (folder / name).stat()) for name in names if is_file(folder / name)]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def has_quantized_weights(folder: Path) -> bool:
    """Whether the weights of a folder are quantized already. Raises ModelError if its config.json is invalid."""
    return is_quantized(_config(folder, {}))


def is_quantized(config: dict[str, Any]) -> bool:
    """Whether a config.json describes quantized weights."""
    return bool(config.get(QUANTIZATION))


def _config(folder: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
    """A folder's config.json, with the quantization that some models for texts and images have in `text_config`.

    Raises ModelError if the weights are in a file that is not read.
    """
    config = _json(folder, CONFIG, default)
    text = config.get("text_config")
    if QUANTIZATION not in config and isinstance(text, dict) and text.get(QUANTIZATION):
        config = {**config, QUANTIZATION: text[QUANTIZATION]}
    if (named := config.get(WEIGHTS_KEY)) not in (None, SINGLE, INDEX):
        raise ModelError(
            f"{folder / CONFIG}: {WEIGHTS_KEY} is {shown(named)}; only {SINGLE} or {INDEX} are read: rename the file, "
            "and remove the key"
        )
    return config


def require_supported(config: Path, overrides: Mapping[str, Any] | None = None) -> None:
    """Raises ModelError if a config.json, with the setting `hf_overrides`, is of another architecture than ours."""
    values = decode_json(config, MAX_JSON_BYTES, dict[str, Any])
    ConfigReader(config, hf_overrides.applied(values, overrides or {})).architecture()


def convert(
    source: Path,
    target: Path,
    name: str,
    quantization: PreparedFormat,
    progress: Progress,
    overrides: Mapping[str, Any] | None = None,
) -> None:
    """Write the prepared model of folder `source` to `target`; `name` is its name for clients. `overrides` are the
    setting `hf_overrides`.

    Weights that are floats are read in place with `quantization` "auto" or "none".

    Raises ModelError, naming file and key, if the model is incomplete or not supported.
    """
    config_path = source / CONFIG
    config = hf_overrides.applied(_config(source), overrides or {})
    generation = _json(source, "generation_config.json", {})
    tokenizer_config = _json(source, "tokenizer_config.json", {})
    reader = ConfigReader(config_path, config)
    reader.architecture()  # first: what else a model of another architecture lacks here does not matter
    files = weight_files(source)
    written = write_tokenizer(source, target, config)
    model = reader.model(name, files, generation)
    model = with_special_ids(model, written, source)
    found, doubled = find_tensors(files, last_counts=index_of(source) is not None)
    model, tied = with_head_of(with_layout_of(model, found), found)
    modules = sentence_transformers.read(source)
    score_tokens = _score_tokens(config, config_path, written.tokenizer)
    pooler = PoolerReader(config_path, config, model, found, modules).read(reader.head(), score_tokens)
    templates = chat_templates.templates_of(source, tokenizer_config)
    chat_template = templates.by_name.get(chat_templates.DEFAULT)
    pooler, without_template = pair_templates.add_to_folder(
        pooler, model, config, chat_template, modules, written.tokenizer, score_tokens, target
    )
    model = with_pooler(model, pooler)
    if model.generates:
        check_decodes(written.tokenizer, str(source / "tokenizer.json"))
    named = ", ".join(map(shown, overrides or {}))
    notes = [*([f"hf_overrides replaces {named}"] if named else []), *reader.notes, *doubled, *tied]
    notes += [*written.notes, *templates.notes, *without_template, *generation_config.unused(generation)]
    notes += reply_ends(model.eos_ids, generation)
    notes += media_config.add_to_folder(source, config, written.tokenizer, target)
    vision, seen = tower.read(config_path, config, model, media.load(target), found)
    of_tower = set() if vision is None else set(stored_shapes(vision))
    notes += [seen] if seen else []
    scheme = None
    if is_quantized(config):
        # Imported here: most models are not quantized.
        from pipeline.stages.prepare.quantized.methods import scheme_of

        scheme = scheme_of(config, config_path)
    stored: Found = {}
    if scheme is None:
        stored = check_tensors(model, found)
        used = {*stored, *of_tower, *(() if pooler is None else pooler.used)}
        unused = [tensor for tensor in found if tensor not in used]
        notes += ignored(rules_of(model, has_tower=vision is not None), unused, found)
    chat_templates.write(templates.by_name, source, target)
    if scheme is not None:
        from pipeline.stages.prepare.quantized.convert import convert as convert_quantized
        from pipeline.stages.prepare.weights.weight_file import WEIGHTS

        of_text = {name: each for name, each in found.items() if name not in of_tower}
        notes += convert_quantized(model, scheme, of_text, target, quantization, progress)
        model = msgspec.structs.replace(model, weight_files=[WEIGHTS])
    elif quantization not in ("auto", "none"):
        # Imported here: most models need neither numpy's nor gguf's quantizers.
        from pipeline.stages.prepare.weights.weight_file import WEIGHTS, quantize

        with progress.measure(f"quantizing {name} to {quantization}") as report:
            quantize(model, target, stored, quantization, report)
        model = msgspec.structs.replace(model, weight_files=[WEIGHTS])
    if pooler is not None:
        pooler.write(target)
    if vision is not None:
        tower.with_files(vision, found, of_tower).save(target)
    generation_config.save(generation, target)
    if notes:
        (target / NOTES).write_text("".join(f"{note}\n" for note in notes), encoding="utf-8")
    model.save(target)


def _score_tokens(config: Mapping[str, Any], path: Path, tokenizer: Tokenizer) -> tuple[int, int] | None:
    """The ids of the true and the false token whose logits make the score of a reranker, if config.json or
    `hf_overrides` names them (vLLM's key). Raises ModelError."""
    tokens = config.get(SCORE_TOKENS)
    if tokens is None:
        return None
    if not isinstance(tokens, list) or len(tokens) != 2 or not all(isinstance(token, str) for token in tokens):
        raise ModelError(f"{path}: {SCORE_TOKENS} is {shown(tokens)}; it must be two tokens, as no and yes")
    false_id, true_id = map(tokenizer.token_to_id, tokens)
    if false_id is None or true_id is None:
        raise ModelError(f"{path}: {SCORE_TOKENS} is {shown(tokens)}; the tokenizer lacks one of them")
    return true_id, false_id


def _json(source: Path, name: str, default: dict[str, Any] | None = None) -> dict[str, Any]:
    path = find(source, name)
    if path is None:
        if default is not None:
            return default
        raise ModelError(f"{source / name} is missing: a model folder needs config.json, a tokenizer and *.safetensors")
    return decode_json(path, MAX_JSON_BYTES, dict[str, Any])
