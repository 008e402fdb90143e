"""Converts the vision tower of a .gguf file, llama.cpp's `mmproj-…`, for the language model of another one.

Its tensors are written into a file of the prepared folder, as floats under the names of `VisionConfig.encoder`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer

from pipeline.media import config as media
from pipeline.runtime.model.model_config import Layout, ModelConfig
from pipeline.runtime.model.vision_config import VisionConfig
from pipeline.stages.prepare.families.keys import ConfigFault, Keys
from pipeline.stages.prepare.files import shown
from pipeline.stages.prepare.gguf.conversions import pieces_of, rotated_halves
from pipeline.stages.prepare.gguf.file import GgufTensor
from pipeline.stages.prepare.gguf.parts import read_parts
from pipeline.stages.prepare.gguf.vision.projectors import EPS, SIZES, Files, files_of
from pipeline.stages.prepare.media import families as media_families
from pipeline.stages.prepare.media.model_files import MediaFault, ModelFiles
from pipeline.stages.prepare.progress import Progress
from pipeline.stages.prepare.shape import check_shape
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.vision.families import FAMILIES
from pipeline.stages.prepare.vision.tensors import tower_shapes
from pipeline.stages.prepare.vision.tower_source import NotServed, Source
from pipeline.stages.prepare.weights.tensors import Shape
from pipeline.stages.prepare.weights.weight_file import Stored, write_weights

ARCHITECTURE = "clip"
TOWER_WEIGHTS = "vision.safetensors"
NAMES = {
    "vision.patches": "v.patch_embd",
    "vision.positions": "v.position_embd",
    "model.embed_norm": "v.pre_ln",
    "model.norm": "v.post_ln",
    "vision.projector.norm": "mm.input_norm",
}
LAYER = {
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
    "self_attn.o_proj": "attn_out",
    "input_layernorm": "ln1",
    "post_attention_layernorm": "ln2",
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
}
"""Of a layer."""
SWAPPED = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}


def add_to_folder(path: Path, text: ModelConfig, tokenizer: Tokenizer, folder: Path, progress: Progress) -> list[str]:
    """Write the tower of the file `path`, for the language model `text`, and how images are processed, to its prepared
    folder. Returns notes.

    Raises ModelError, naming file and key or tensor, if the file is no projector, is incomplete, or is that of another
    language model.
    """
    metadata, tensors = read_parts([path])
    if (found := metadata.need("general.architecture", str)) != ARCHITECTURE:
        raise ModelError(f"{path}: general.architecture is {shown(found)}; that of a projector is {ARCHITECTURE}")
    try:
        files = files_of(metadata, tensors, tokenizer)
        vision, processing = _configs(path, files, text, tokenizer)
    except NotServed as reason:
        return [f"images are not served: {path.name}: {reason}"]
    names = _names(vision, files, tensors)
    _check(path, vision, tensors, names)
    if unknown := set(tensors) - set(names.values()) - set(files.unused):
        raise ModelError(f"{path}: tensor {min(unknown)[:200]} is not part of the tower that the metadata describes")

    def pieces(name: str) -> Iterator["np.ndarray[Any, Any]"]:
        tensor, order = tensors[names[name]], None
        if files.is_interleaved and ("q_proj" in name or "k_proj" in name):
            order = rotated_halves(tensor.shape[0], vision.encoder.head_dim)
        return pieces_of(tensor, order, False, path)

    targets = {
        name: Stored("bf16" if tensors[names[name]].kind == Kind.BF16 and len(shape) > 1 else "f32", shape)
        for name, shape in tower_shapes(vision).items()
    }
    with progress.measure(f"converting {path.name}") as report:
        write_weights(folder, targets, pieces, path, report, TOWER_WEIGHTS)
    vision.save(folder)
    media.save(processing, folder)
    return []


def _configs(
    path: Path, files: Files, text: ModelConfig, tokenizer: Tokenizer
) -> tuple[VisionConfig, media.MediaConfig]:
    """Raises ModelError, and NotServed."""
    kind, values = files.config["model_type"], files.config["vision_config"]
    try:
        read = media_families.FAMILIES[kind](ModelFiles(files.config, files.image_processor, {}, {}, tokenizer))
        vision = FAMILIES[kind](Source(Keys(files.config, {}, {}), values, read, text))
    except MediaFault as fault:
        raise NotServed(str(fault)) from fault
    except ConfigFault as fault:
        raise ModelError(f"{path}: {fault}") from fault
    encoder = msgspec.structs.replace(vision.encoder, layout=Layout(), weight_files=[TOWER_WEIGHTS])
    fields = {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "rms_norm_eps": ""}
    keys = {field: SIZES.get(fields.get(field, field), EPS) for field in ("hidden_size", "intermediate_size", *fields)}
    check_shape(encoder, path, keys | {"num_kv_heads": keys["num_heads"], "head_dim": keys["num_heads"]})
    return msgspec.structs.replace(vision, encoder=encoder), read


def _names(vision: VisionConfig, files: Files, tensors: dict[str, GgufTensor]) -> dict[str, str]:
    """The tensors of the .gguf file by their names here."""
    is_swapped = _has_swapped_matrices(vision, tensors)
    return {name: _name(name, files, is_swapped) for name in tower_shapes(vision)}


def _name(name: str, files: Files, is_swapped: bool) -> str:
    module, _, kind = name.rpartition(".")
    if module == "vision.class":
        return "v.class_embd"
    if module.startswith("model.layers."):
        _, _, number, part = module.split(".", 3)
        own = LAYER[part]
        return f"v.blk.{number}.{SWAPPED.get(own, own) if is_swapped else own}.{kind}"
    if (projector := module.removeprefix("vision.projector.")).isdecimal():
        return f"{files.projector[int(projector)]}.{kind}"
    return f"{NAMES[module]}.{kind}"


def _has_swapped_matrices(vision: VisionConfig, tensors: dict[str, GgufTensor]) -> bool:
    """Whether `ffn_down` is what other files call `ffn_up`, as in files of llama.cpp's first converter."""
    found, config = tensors.get("v.blk.0.ffn_down.weight"), vision.encoder
    sizes = (config.intermediate_size, config.hidden_size)
    return not config.gated and found is not None and found.shape == sizes != sizes[::-1]


def _check(path: Path, vision: VisionConfig, tensors: dict[str, GgufTensor], names: dict[str, str]) -> None:
    """Raises ModelError if a tensor is missing or has another shape."""
    last = f"vision.projector.{len(vision.projector.matrices) - 1}."
    for name, shape in tower_shapes(vision).items():
        tensor = tensors.get(names[name])
        if tensor is None:
            raise ModelError(f"{path}: the tensor {names[name]} is missing")
        if _without_ones(tensor.shape) == _without_ones(shape):
            continue
        found = f"{path}: tensor {tensor.name} has shape {shown(tensor.shape)}"
        if name.startswith(last) and tensor.shape[0] != shape[0]:
            raise ModelError(
                f"{found}, so it makes {tensor.shape[0]} numbers for the language model, whose hidden size is "
                f"{shape[0]}: it is the projector of another model"
            )
        raise ModelError(f"{found}, but the metadata says {shown(shape)}")


def _without_ones(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1)
