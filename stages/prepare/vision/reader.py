"""Reads the vision tower of a folder in Hugging Face layout.

A family is a function from the keys of config.json to a `VisionConfig`; `FAMILIES` has one for each `model_type`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pipeline.media.config import MediaConfig
from pipeline.runtime.model.model_config import Activation, Layout, ModelConfig, Piece
from pipeline.runtime.model.vision_config import Matrix, Pixels, Projector, VisionConfig
from pipeline.stages.prepare.families.keys import ACTIVATIONS, ConfigFault, Keys
from pipeline.stages.prepare.files import shown
from pipeline.stages.prepare.shape import check_shape
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.vision.tensors import missing_tensor, with_names_of
from pipeline.stages.prepare.weights.tensors import Found

SIGLIP = {
    "norm": "layer",
    "norm_bias": True,
    "causal": False,
    "gated": False,
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
    "rotary_dim": 0,
}
"""Fields of the layers of SigLIP, CLIP and others."""
SIGLIP_LAYERS = {
    "self_attn.o_proj": Piece("self_attn.out_proj"),
    "input_layernorm": Piece("layer_norm1"),
    "post_attention_layernorm": Piece("layer_norm2"),
    "mlp.up_proj": Piece("mlp.fc1"),
    "mlp.down_proj": Piece("mlp.fc2"),
}
NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_attention_heads",
    "rms_norm_eps": "layer_norm_eps",
}
"""Keys of vision_config that differ from the field names of ModelConfig."""


@dataclass(frozen=True, slots=True)
class Source:
    """What a family reads."""

    whole: Keys
    """Of config.json."""
    vision: Keys
    """Of its vision_config."""
    pixels: Pixels
    text: ModelConfig
    path: Path


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
    pixels = Pixels(scale=media.scale, mean=list(media.mean), std=list(media.std))
    source = Source(Keys(config, {}, {}), Keys(values, {}, family.defaults), pixels, text, path)
    try:
        vision = family.read(source)
    except ConfigFault as fault:
        where = "" if str(fault).startswith(tuple(family.outside)) else "vision_config."
        raise ModelError(f"{path}: {where}{fault}") from fault
    check_shape(vision.encoder, path, {field: f"vision_config.{NAMES.get(field, field)}" for field in FIELDS})
    vision = with_names_of(vision, found)
    if (name := missing_tensor(vision, found)) is not None:
        return None, f"images are not served: the weights have no floats {shown(name)}"
    return vision, ""


FIELDS = ("hidden_size", "intermediate_size", "head_dim", *NAMES)


def activation_of(keys: Keys, key: str, default: str) -> Activation:
    """An activation. Raises ConfigFault for unknown ones."""
    name = keys.get(key, str, default)
    if name not in ACTIVATIONS:
        raise keys.fault(key, f"one of {', '.join(map(repr, ACTIVATIONS))}")
    return ACTIVATIONS[name]


def siglip(source: Source, layout: Layout, **others: Any) -> ModelConfig:
    """The layers of SigLIP."""
    keys = source.vision
    hidden, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    if hidden % heads:
        raise keys.fault("hidden_size", f"a multiple of num_attention_heads = {heads}")
    num_positions = (keys.count("image_size") // keys.count("patch_size")) ** 2
    fields = {
        **SIGLIP,
        "num_layers": keys.count("num_hidden_layers"),
        "max_position": num_positions,
        "rms_norm_eps": keys.number("layer_norm_eps", 1e-6),
        "activation": activation_of(keys, "hidden_act", "gelu_pytorch_tanh"),
        **others,
    }
    return ModelConfig(
        name=source.text.name,
        architecture="vision",
        hidden_size=hidden,
        intermediate_size=keys.count("intermediate_size"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        vocab_size=1,
        rope_theta=1.0,
        tie_embeddings=True,
        eos_ids=[],
        weight_files=[],
        layout=layout,
        **fields,
    )


def patch_fields(source: Source) -> dict[str, Any]:
    """Fields of VisionConfig. Raises ConfigFault."""
    keys = source.vision
    size, patch = keys.count("image_size"), keys.count("patch_size")
    if size < patch:
        raise keys.fault("image_size", f"at least patch_size = {patch}")
    if keys.count("num_channels", 3) != 3:
        raise keys.fault("num_channels", "3")
    return {"image_size": size, "patch_size": patch, "pixels": source.pixels}


def tower_pieces(prefix: str, projector: Mapping[str, str]) -> dict[str, Piece]:
    """The tensors outside of layers of a tower with SigLIP's names."""
    pieces = {
        "vision.patches": f"{prefix}embeddings.patch_embedding",
        "vision.positions": f"{prefix}embeddings.position_embedding",
        "model.norm": f"{prefix}post_layernorm",
        **projector,
    }
    return {name: Piece(tensor) for name, tensor in pieces.items()} | SIGLIP_LAYERS


def _idefics3(source: Source) -> VisionConfig:
    merge = source.whole.count("scale_factor", 2)
    pieces = tower_pieces("vision_model.", {"vision.projector.0": "connector.modality_projection.proj"})
    fields = patch_fields(source)
    side = fields["image_size"] // fields["patch_size"]
    if side % merge:
        raise source.whole.fault("scale_factor", f"a divisor of the {side} patches of an image's side")
    return VisionConfig(
        encoder=siglip(source, Layout("vision_model.encoder.layers.{}.", pieces)),
        positions="buckets",
        projector=Projector(merge=merge, matrices=[Matrix(num_outputs=source.text.hidden_size)]),
        **fields,
    )


@dataclass(frozen=True, slots=True)
class Family:
    """How to read the tower of one `model_type`."""

    read: Callable[[Source], VisionConfig]
    defaults: Mapping[str, Any]
    """transformers' defaults for absent keys of vision_config."""
    outside: tuple[str, ...] = ("vision_config",)
    """Keys that are not in vision_config."""


IDEFICS3 = Family(
    _idefics3,
    {
        "hidden_size": 1152,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "image_size": 224,
        "patch_size": 32,
    },
    ("scale_factor",),
)
FAMILIES: dict[str, Family] = {"idefics3": IDEFICS3, "smolvlm": IDEFICS3}
"""By `model_type` of config.json."""


def with_files(vision: VisionConfig, found: Found, names: set[str]) -> VisionConfig:
    """The config with the weight files that have its tensors, `names`."""
    files = list(dict.fromkeys(str(path) for name, (path, _) in found.items() if name in names))
    return msgspec.structs.replace(vision, encoder=msgspec.structs.replace(vision.encoder, weight_files=files))
