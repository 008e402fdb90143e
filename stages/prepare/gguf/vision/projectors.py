"""The kinds of projectors in .gguf files: how their keys become those of config.json and preprocessor_config.json,
which the families of towers and of image processors read.

    clip.projector_type   tower                            family
    idefics3              SigLIP                           idefics3
    mlp                   CLIP, or SigLIP without a class  llava
    pixtral               Pixtral                          llava, or mistral3 if it merges patches

Keys and names: https://github.com/ggml-org/llama.cpp/blob/master/tools/mtmd/clip-impl.h
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from pipeline.stages.prepare.files import shown
from pipeline.stages.prepare.gguf.metadata import Metadata, shortest
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.vision.tower_defaults import CLIP, PIXTRAL, SIGLIP_KIND
from pipeline.stages.prepare.vision.tower_source import NotServed

V = "clip.vision."
SIZES = {
    "image_size": f"{V}image_size",
    "patch_size": f"{V}patch_size",
    "hidden_size": f"{V}embedding_length",
    "intermediate_size": f"{V}feed_forward_length",
    "num_hidden_layers": f"{V}block_count",
    "num_attention_heads": f"{V}attention.head_count",
}
"""The keys of numbers that all towers have, by the names in vision_config."""
EPS, USE_GELU, USE_SILU = f"{V}attention.layer_norm_epsilon", "clip.use_gelu", "clip.use_silu"
FEATURE_LAYERS, MERGE_TYPE, PINPOINTS = f"{V}feature_layer", f"{V}mm_patch_merge_type", f"{V}image_grid_pinpoints"
SCALE_FACTOR, LONGEST_EDGE = f"{V}projector.scale_factor", f"{V}preproc_image_size"
CLASS, BREAK = "v.class_embd", "v.token_embd.img_break"


@dataclass(frozen=True, slots=True)
class Files:
    """What transformers' files would say."""

    config: dict[str, Any]
    image_processor: dict[str, Any]
    projector: list[str]
    """The names of its matrices in the .gguf file."""
    is_interleaved: bool = False
    """Whether the rows of q and k are those of pairs that rotate, as in the .gguf files of Llama."""
    unused: Collection[str] = ()
    """Tensors that the language model has, too."""


def _idefics3(metadata: Metadata, tensors: Collection[str], tokenizer: Tokenizer) -> Files:
    vision = _vision(metadata, "idefics3", "gelu_pytorch_tanh")
    longest = metadata.get(LONGEST_EDGE, int, 4 * vision["image_size"])
    config = {
        "model_type": "idefics3",
        "scale_factor": metadata.need(SCALE_FACTOR, int),
        "image_token_id": _token(tokenizer, "<image>"),
        "vision_config": vision,
    }
    image_processor = {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": longest},
        "max_image_size": {"longest_edge": vision["image_size"]},
    }
    return Files(config, image_processor, ["mm.model.fc"])


def _mlp(metadata: Metadata, tensors: Collection[str], tokenizer: Tokenizer) -> Files:
    """LLaVA 1.5. Its files have only the layers that are used."""
    merge = metadata.get(MERGE_TYPE, str, "flat")
    if merge != "flat" or metadata.get(PINPOINTS, list):
        what = f"{MERGE_TYPE} is {shown(merge)}" if merge != "flat" else f"it has {PINPOINTS}"
        raise NotServed(f"{what}: images of several tiles are not supported for this projector")
    is_clip = CLASS in tensors
    gelu = "gelu" if metadata.get(USE_GELU, bool, False) else "quick_gelu"
    vision = _vision(metadata, CLIP if is_clip else SIGLIP_KIND, gelu if is_clip else "gelu_pytorch_tanh")
    layers = metadata.list_of(FEATURE_LAYERS, int) or [vision["num_hidden_layers"]]
    side = {"height": vision["image_size"], "width": vision["image_size"]}
    config = {
        "model_type": "llava",
        "image_token_id": _token(tokenizer, "<image>"),
        "vision_config": vision,
        "vision_feature_layer": layers[0] if len(layers) == 1 else layers,
        "vision_feature_select_strategy": "default" if is_clip else "full",
        "multimodal_projector_bias": "mm.0.bias" in tensors,
    }
    if is_clip:
        size: dict[str, Any] = {"size": {"shortest_edge": vision["image_size"]}, "crop_size": side}
        if metadata.get(f"{V}image_aspect_ratio", str, "") == "pad":
            size["do_pad"] = True
        kind = "LlavaImageProcessor" if "do_pad" in size else "CLIPImageProcessor"
    else:
        size, kind = {"size": side}, "SiglipImageProcessor"
    return Files(config, {"image_processor_type": kind, **size}, ["mm.0", "mm.2"])


def _pixtral(metadata: Metadata, tensors: Collection[str], tokenizer: Tokenizer) -> Files:
    activations = {key: metadata.get(key, bool, False) for key in (USE_GELU, USE_SILU)}
    if sum(activations.values()) != 1:
        raise ModelError(f"{metadata.path}: either {USE_GELU} or {USE_SILU} must be true")
    vision = _vision(metadata, PIXTRAL, "silu" if activations[USE_SILU] else "gelu")
    merge = metadata.get(f"{V}spatial_merge_size", int, 1)
    merges = "mm.patch_merger.weight" in tensors
    if merge > 1 and not merges:
        raise ModelError(f"{metadata.path}: the tensor mm.patch_merger.weight is missing")
    config = {
        "model_type": "mistral3" if merges else "llava",
        "image_token_id": _token(tokenizer, "[IMG]"),
        "spatial_merge_size": merge,
        "vision_config": vision,
        "vision_feature_layer": -1,
        "multimodal_projector_bias": "mm.1.bias" in tensors,
    }
    image_processor = {
        "image_processor_type": "PixtralImageProcessor",
        "size": {"longest_edge": vision["image_size"]},
    }
    names = ["mm.patch_merger", "mm.1", "mm.2"] if merges else ["mm.1", "mm.2"]
    return Files(config, image_processor, names, is_interleaved=True, unused=(BREAK,))


PROJECTORS: Mapping[str, Callable[[Metadata, Collection[str], Tokenizer], Files]] = {
    "idefics3": _idefics3,
    "mlp": _mlp,
    "pixtral": _pixtral,
}
"""By `clip.projector_type`. They raise ModelError, and NotServed."""


def files_of(metadata: Metadata, tensors: Collection[str], tokenizer: Tokenizer) -> Files:
    """What transformers' files would say of the tower of a .gguf file. Raises ModelError for a missing key or a value
    of another type, and NotServed, with the reason, for what is not supported."""
    kind = metadata.get("clip.projector_type", str) or metadata.get(f"{V}projector_type", str, "mlp")
    if not metadata.get("clip.has_vision_encoder", bool, False):
        raise NotServed("it has no vision tower (clip.has_vision_encoder)")
    if kind not in PROJECTORS:
        raise NotServed(f"clip.projector_type is {shown(kind)}; supported are {', '.join(PROJECTORS)}")
    found = PROJECTORS[kind](metadata, tensors, tokenizer)
    colors = {name: _color(metadata, f"{V}{name}") for name in ("image_mean", "image_std")}
    return Files(found.config, {**found.image_processor, **colors}, found.projector, found.is_interleaved, found.unused)


def _vision(metadata: Metadata, kind: str, activation: str) -> dict[str, Any]:
    """`vision_config`. Raises ModelError."""
    sizes: dict[str, Any] = {name: metadata.need(key, int) for name, key in SIZES.items()}
    eps = shortest(metadata.need(EPS, float))
    return {"model_type": kind, **sizes, "layer_norm_eps": eps, "hidden_act": activation}


def _color(metadata: Metadata, key: str) -> list[float]:
    values = metadata.list_of(key, float)
    if values is None:
        raise ModelError(f"{metadata.path}: the key {key} is missing")
    return [shortest(value) for value in values]


def _token(tokenizer: Tokenizer, token: str) -> int:
    number: int | None = tokenizer.token_to_id(token)
    if number is None:
        raise NotServed(f"the vocabulary of the language model has no token {token}, which stands for images")
    return number
