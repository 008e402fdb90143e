"""Prepares the EAGLE head of speculative decoding: its weights stay in place, and their names and sizes are checked.

Checkpoints are folders as vLLM and SGLang read them: config.json describes the head's layers, and the tensors are
`fc.weight` [hidden_size, 2 * hidden_size] and those of `layers.0`, `layers.1` …, by Llama's names.

EAGLE-3 heads have one layer, `midlayer` or `layers.0`, whose queries, keys and values read 2 * hidden_size numbers, and

    fc.weight                      [hidden_size, 3 * hidden_size]
    midlayer.hidden_norm.weight    [hidden_size]
    norm.weight                    [hidden_size]
    lm_head.weight                 [draft_vocab_size, hidden_size]
    d2t                            [draft_vocab_size] int64: the model's id, less the head's; absent if equal
    embed_tokens.weight            [vocab_size, hidden_size]; absent if it is the model's
"""

import hashlib
from collections.abc import Container
from pathlib import Path

import msgspec
import numpy as np

from pipeline.config.settings import Settings
from pipeline.runtime.model.model_config import Layout, ModelConfig, Piece
from pipeline.runtime.model.special_layers import Eagle3
from pipeline.runtime.model.weight_headers import TensorEntry
from pipeline.stages.prepare.cache import Cache
from pipeline.stages.prepare.files import MAX_JSON_BYTES, decode_json, shown
from pipeline.stages.prepare.progress import Progress
from pipeline.stages.prepare.sources.config_json import ConfigReader
from pipeline.stages.prepare.sources.folder import state
from pipeline.stages.prepare.sources.layout import weight_files
from pipeline.stages.prepare.sources.source import FolderSource, ModelError, parse
from pipeline.stages.prepare.weights.tensors import Found, find_tensors, model_shapes
from pipeline.stages.prepare.weights.unused_tensors import ROTARY, Rule, ignored

FORMAT = 3
KEY = "speculative.draft"
PREFIX = "model."
LAYERS = "eagle_aux_hidden_state_layer_ids"
"""The key of config.json for the layers before which an EAGLE-3 head reads hidden states."""
NAMES = ("EagleLlamaForCausalLM", "EAGLEModel", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "EAGLE3Model")
CLASSES = dict.fromkeys(NAMES, "LlamaForCausalLM")
"""Names that exporters of heads use in config.json, for the layers' own."""

TENSORS = ("fc.weight", "fc.bias")
EAGLE3_TENSORS = (
    *TENSORS,
    *("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight", "norm.weight", "lm_head.weight"),
    *("embed_tokens.weight", "d2t"),
)
"""Tensors outside of the layers that a head computes with."""
BUFFERS = Rule("rotary frequencies are computed from config.json", lambda name: name.endswith(ROTARY))
RULES = (
    BUFFERS,
    Rule("the head uses the model's own embedding", lambda name: name.removeprefix(PREFIX) == "embed_tokens.weight"),
    Rule("the head uses the model's own LM head", lambda name: name == "lm_head.weight"),
)
EAGLE3_RULES = (BUFFERS, Rule("it says the same as d2t", lambda name: name == "t2d"))
"""Why tensors of a head may stay unused."""


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
        config, notes = _convert(folder, target)
        for note in notes:
            progress.say(f"{config.name}: {note}")
        config.save(prepared)

    return Cache.of(settings).ensure(key, str(folder), fill, progress.say, settings.supervisor.prepare_timeout_s)


def _convert(folder: Path, target: ModelConfig) -> tuple[ModelConfig, list[str]]:
    """The configuration of a head, and lines about tensors that are not used."""
    path = folder / "config.json"
    fields = decode_json(path, MAX_JSON_BYTES, dict[str, object])
    classes = fields.get("architectures")
    if isinstance(classes, list) and classes and classes[0] in CLASSES:
        fields["architectures"] = [CLASSES[classes[0]]]
    files = weight_files(folder)
    config = ConfigReader(path, fields).model(folder.name, files, {})
    tensors, _ = find_tensors(files)
    prefix = PREFIX if any(name.startswith(f"{PREFIX}layers.") for name in tensors) else ""
    is_eagle3 = "d2t" in tensors or any(name.endswith(".hidden_norm.weight") for name in tensors)
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
    if is_eagle3:
        config = _convert_eagle3(folder, fields, config, tensors, target)
        return config, ignored(EAGLE3_RULES, _unused(config, tensors, EAGLE3_TENSORS), tensors)
    if f"{prefix}layers.0.input_layernorm.weight" in tensors:
        raise ModelError(f"{KEY}: {folder} has a norm before its first layer, which EAGLE heads have not")
    layout = config.layout if prefix else Layout("layers.{}.", config.layout.pieces, config.layout.experts)
    config = msgspec.structs.replace(config, layout=layout, tie_embeddings=True)
    return config, ignored(RULES, _unused(config, tensors, TENSORS), tensors)


def _unused(config: ModelConfig, tensors: Found, others: Container[str]) -> list[str]:
    """The tensors of a head that are neither in its layers nor among `others`."""
    names = [name for name in model_shapes(config) if name.startswith("model.layers.")]
    used = {config.layout.find(name)[0] for name in names}
    return [name for name in tensors if name not in used and name not in others]


def _convert_eagle3(
    folder: Path, fields: dict[str, object], config: ModelConfig, tensors: Found, target: ModelConfig
) -> ModelConfig:
    """The configuration of an EAGLE-3 head, whose tensors are checked."""
    hidden = config.hidden_size
    if config.num_layers != 1:
        raise ModelError(f"{KEY}: {folder} has num_hidden_layers {config.num_layers}; EAGLE-3 heads have 1")
    layer = "midlayer." if any(name.startswith("midlayer.") for name in tensors) else "layers.0."
    num_ids = fields.get("draft_vocab_size") or config.vocab_size
    if not isinstance(num_ids, int) or not 0 < num_ids <= config.vocab_size:
        raise ModelError(f"{KEY}: draft_vocab_size in {folder} must be a number from 1 to vocab_size")
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        f"{layer}hidden_norm.weight": (hidden,),
        f"{layer}input_layernorm.weight": (hidden,),
        f"{layer}self_attn.q_proj.weight": (config.num_heads * config.head_dim, 2 * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (num_ids, hidden),
    }
    if num_ids < config.vocab_size:
        shapes["d2t"] = (num_ids,)
    for name, shape in shapes.items():
        if name not in tensors:
            raise ModelError(f"{KEY}: {folder} lacks the tensor {name} of an EAGLE-3 head")
        if (found := tuple(tensors[name][1].shape)) != shape:
            raise ModelError(f"{KEY}: the tensor {name} in {folder} has shape {list(found)}, not {list(shape)}")
    if "d2t" in tensors:
        _check_ids(tensors["d2t"], num_ids, config.vocab_size)
    return msgspec.structs.replace(
        config,
        layout=Layout(layer, {"model.embed_tokens": Piece("embed_tokens"), "model.norm": Piece("norm")}),
        tie_embeddings=False,
        eagle3=Eagle3(
            layers=_layers_of(folder, fields, target),
            draft_vocab_size=num_ids,
            norm_before_residual=bool(fields.get("norm_before_residual", False)),
        ),
    )


def _layers_of(folder: Path, fields: dict[str, object], target: ModelConfig) -> list[int]:
    """The layers of the model before which the head reads hidden states, as vLLM chooses them."""
    nested = fields.get("eagle_config")
    given = fields.get(LAYERS) or (nested.get(LAYERS) if isinstance(nested, dict) else None)
    num = target.num_layers
    found: object = [2, num // 2, num - 3] if given is None else given
    layers = [layer for layer in found if type(layer) is int] if isinstance(found, list) else []
    if len(layers) != 3 or layers != found or not 0 <= layers[0] < layers[1] < layers[2] < num:
        where = LAYERS if given is not None else f"the default of {LAYERS}"
        raise ModelError(
            f"{KEY}: {where} in {folder} is {shown(found)}; the model has {num} layers, and an EAGLE-3 head reads the "
            "hidden states before three of them, in rising order"
        )
    return layers


def _check_ids(found: tuple[Path, TensorEntry], num_ids: int, vocab_size: int) -> None:
    """Raise ModelError if the head's ids are not all ids of the model."""
    path, entry = found
    if entry.dtype != "I64":
        raise ModelError(f"{KEY}: the tensor d2t in {path} is {entry.dtype}, not I64")
    offsets = np.memmap(path, "<i8", mode="r", offset=entry.data_offsets[0], shape=(num_ids,))
    ids = offsets + np.arange(num_ids)
    if num_ids and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise ModelError(f"{KEY}: the tensor d2t in {path} names ids from {ids.min()} to {ids.max()}, of {vocab_size}")
