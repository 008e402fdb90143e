"""The families of vision towers: how each reads config.json. Defaults are those of transformers.

Layers have SigLIP's form, with differences that are fields of the tower's `ModelConfig`.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

import msgspec

from pipeline.media.config import LlavaOnevision, MediaConfig, Qwen2VL
from pipeline.runtime.model.model_config import Activation, Layout, ModelConfig, Piece
from pipeline.runtime.model.vision_config import Anyres, Matrix, Pixels, Projector, VisionConfig, Windows
from pipeline.stages.prepare.families.architecture import qkv_slices, renamed
from pipeline.stages.prepare.families.keys import ACTIVATIONS, Keys
from pipeline.stages.prepare.files import shown
from pipeline.stages.prepare.vision.tower_defaults import (
    CLIP,
    IDEFICS3_DEFAULTS,
    PIXTRAL,
    SIGLIP_KIND,
    TOWER_DEFAULTS,
)

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


class NotServed(Exception):
    """The files are valid, but images are not served. The message is the reason."""


class VisionKeys(Keys):
    """The values of `vision_config`, whose name is before those of its keys."""

    def __init__(
        self, config: Mapping[str, Any], defaults: Mapping[str, Any], names: Mapping[str, str] | None = None
    ) -> None:
        super().__init__({f"vision_config.{key}": value for key, value in config.items()}, names or {}, defaults)

    def name(self, key: str) -> str:
        return f"vision_config.{self._names.get(key, key)}"


@dataclass(frozen=True, slots=True)
class Source:
    """What a family reads."""

    config: Keys
    """Of config.json."""
    vision_config: Mapping[str, Any]
    media: MediaConfig
    text: ModelConfig

    def kind(self, default: str, known: Collection[str]) -> str:
        """The kind of the tower. Raises NotServed for unknown ones."""
        kind = VisionKeys(self.vision_config, {}).get("model_type", str, default)
        if kind not in known:
            raise NotServed(f"model_type of vision_config is {shown(kind)}; supported are {', '.join(known)}")
        return str(kind)


def activation_of(keys: Keys, key: str, default: str) -> Activation:
    """An activation. Raises ConfigFault for unknown ones."""
    name = keys.get(key, str, default)
    if name not in ACTIVATIONS:
        raise keys.fault(key, f"one of {', '.join(map(repr, ACTIVATIONS))}")
    return ACTIVATIONS[name]


def layers_of(keys: Keys, source: Source, layout: Layout, **others: Any) -> ModelConfig:
    """The layers of SigLIP. `others` are fields that differ. Raises ConfigFault."""
    hidden, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    if hidden % heads:
        raise keys.fault("hidden_size", f"a multiple of num_attention_heads = {heads}")
    fields = {
        **SIGLIP,
        "num_layers": keys.count("num_hidden_layers"),
        "max_position": (keys.count("image_size") // keys.count("patch_size")) ** 2,
        "rms_norm_eps": keys.number("layer_norm_eps", 1e-6),
        "activation": activation_of(keys, "hidden_act", "gelu_pytorch_tanh"),
        "head_dim": hidden // heads,
        **others,
    }
    if "intermediate_size" not in fields:
        fields["intermediate_size"] = keys.count("intermediate_size")
    return ModelConfig(
        name=source.text.name,
        architecture="vision",
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        vocab_size=1,
        tie_embeddings=True,
        eos_ids=[],
        weight_files=[],
        layout=layout,
        **{"rope_theta": 1.0, **fields},
    )


def patch_fields(keys: Keys, source: Source) -> dict[str, Any]:
    """Fields of VisionConfig. Raises ConfigFault."""
    size, patch = keys.count("image_size"), keys.count("patch_size")
    if size < patch:
        raise keys.fault("image_size", f"at least patch_size = {patch}")
    if keys.count("num_channels", 3) != 3:
        raise keys.fault("num_channels", "3")
    media = source.media
    pixels = Pixels(scale=media.scale, mean=list(media.mean), std=list(media.std))
    return {"image_size": size, "patch_size": patch, "pixels": pixels}


def layout_of(prefix: str, **others: str) -> Layout:
    """SigLIP's names behind a prefix, and further ones; the keys' double underscores are dots."""
    pieces = {
        "vision.patches": f"{prefix}embeddings.patch_embedding",
        "vision.positions": f"{prefix}embeddings.position_embedding",
        "model.norm": f"{prefix}post_layernorm",
    }
    return Layout(
        f"{prefix}encoder.layers.{{}}.",
        {name: Piece(tensor) for name, tensor in pieces.items()} | SIGLIP_LAYERS | renamed(**others),
    )


def _idefics3(source: Source) -> VisionConfig:
    keys, merge = VisionKeys(source.vision_config, IDEFICS3_DEFAULTS), source.config.count("scale_factor", 2)
    layout = layout_of("vision_model.", vision__projector__0="connector.modality_projection.proj")
    fields = patch_fields(keys, source)
    side = fields["image_size"] // fields["patch_size"]
    if side % merge:
        raise source.config.fault("scale_factor", f"a divisor of the {side} patches of an image's side")
    return VisionConfig(
        encoder=layers_of(keys, source, layout),
        positions="buckets",
        projector=Projector(merge=merge, matrices=[Matrix(num_outputs=source.text.hidden_size)]),
        **fields,
    )


def _llava(source: Source) -> VisionConfig:
    """LLaVA 1.5 and LLaVA-OneVision."""
    if VisionKeys(source.vision_config, {}).get("model_type", str) == PIXTRAL:
        return _pixtral(source)
    anyres = Anyres(max_tiles=source.media.max_tiles) if isinstance(source.media, LlavaOnevision) else None
    kind = source.kind(CLIP if anyres is None else SIGLIP_KIND, (CLIP, SIGLIP_KIND))
    keys, config, is_clip = VisionKeys(source.vision_config, TOWER_DEFAULTS[kind]), source.config, kind == CLIP
    strategy = config.get("vision_feature_select_strategy", str, "default" if anyres is None else "full")
    if strategy != ("default" if is_clip else "full"):
        raise NotServed(f"vision_feature_select_strategy is {shown(strategy)} for a tower of {kind}")
    layout = layout_of(
        "vision_tower.",
        model__embed_norm="vision_tower.pre_layrnorm",
        vision__projector__0="multi_modal_projector.linear_1",
        vision__projector__1="multi_modal_projector.linear_2",
    )
    bare = {"vision.class": "vision_tower.embeddings.class_embedding", "vision.newline": "image_newline"}
    layout.pieces.update({name: Piece(tensor, bare=True) for name, tensor in bare.items()})
    fields, hidden = patch_fields(keys, source), source.text.hidden_size
    num_positions = (fields["image_size"] // fields["patch_size"]) ** 2 + is_clip
    others = {"num_layers": _num_layers(keys, config, -2 if anyres is None else -1), "max_position": num_positions}
    bias = config.flag("multimodal_projector_bias", True)
    first = Matrix(num_outputs=hidden, bias=bias, activation=activation_of(config, "projector_hidden_act", "gelu"))
    return VisionConfig(
        encoder=layers_of(keys, source, layout, embedding_norm=is_clip, **others),
        final_norm=False,
        patch_bias=not is_clip,
        class_token=is_clip,
        projector=Projector(matrices=[first, Matrix(num_outputs=hidden, bias=bias)]),
        anyres=anyres,
        **fields,
    )


def _num_layers(keys: Keys, config: Keys, default: int) -> int:
    """Layers before the hidden states that are used. Raises ConfigFault, or NotServed for several."""
    key = "vision_feature_layer"
    value, num = config.get(key, (int, list), default), keys.count("num_hidden_layers")
    if isinstance(value, list):
        raise NotServed(f"{key} is {shown(value)}; one layer is supported")
    found = int(value) if value >= 0 else num + 1 + int(value)
    if not 1 <= found <= num:
        raise config.fault(key, f"one of the {num} layers")
    return found


def _gemma3(source: Source) -> VisionConfig:
    keys, text = VisionKeys(source.vision_config, TOWER_DEFAULTS[source.kind(SIGLIP_KIND, [SIGLIP_KIND])]), source.text
    fields, num_rows = patch_fields(keys, source), source.config.count("mm_tokens_per_image", 256)
    side, rows = fields["image_size"] // fields["patch_size"], isqrt(num_rows)
    if rows**2 != num_rows or side % rows:
        raise source.config.fault("mm_tokens_per_image", f"a square that divides {side} x {side} patches")
    layout = layout_of("vision_tower.", vision__projector__norm="multi_modal_projector.mm_soft_emb_norm")
    matrix = Piece("multi_modal_projector.mm_input_projection_weight", bare=True, transposed=True)
    layout.pieces["vision.projector.0"] = matrix
    encoder = layers_of(keys, source, layout)
    projector = Projector(
        mean=side // rows,
        norm="rms",
        norm_eps=encoder.rms_norm_eps,
        norm_offset=1.0,
        matrices=[Matrix(num_outputs=text.hidden_size)],
    )
    return VisionConfig(encoder=encoder, projector=projector, **fields)


def _pixtral(source: Source) -> VisionConfig:
    """Mistral 3, and LLaVA with Pixtral."""
    source.kind(PIXTRAL, [PIXTRAL])
    keys, config, hidden = (
        VisionKeys(source.vision_config, TOWER_DEFAULTS[PIXTRAL]),
        source.config,
        source.text.hidden_size,
    )
    merges = config.get("model_type", str) == "mistral3"
    bias = config.flag("multimodal_projector_bias", not merges)
    matrices = [
        Matrix(num_outputs=hidden, bias=bias, activation=activation_of(config, "projector_hidden_act", "gelu")),
        Matrix(num_outputs=hidden, bias=bias),
    ]
    names = ["linear_1", "linear_2"]
    merge = config.count("spatial_merge_size", 2) if merges else 1
    if merges:
        matrices, names = (
            [Matrix(num_outputs=keys.count("hidden_size")), *matrices],
            ["patch_merger.merging_layer", *names],
        )
    layout = Layout(
        "vision_tower.transformer.layers.{}.",
        {f"vision.projector.{i}": Piece(f"multi_modal_projector.{name}") for i, name in enumerate(names)}
        | PIXTRAL_PIECES,
    )
    rope = keys.get("rope_parameters", dict, {})
    others = {
        "num_layers": _num_layers(keys, config, -1),
        "norm": "rms",
        "norm_bias": False,
        "rms_norm_eps": 1e-5,
        "gated": True,
        "embedding_norm": True,
        "rope_theta": Keys(rope, {}, {}).number("rope_theta", keys.number("rope_theta", 10000.0)),
        **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), False),
    }
    projector = Projector(
        merge=merge,
        by_number=merges,
        norm="rms" if merges else None,
        norm_eps=source.text.rms_norm_eps,
        matrices=matrices,
    )
    return VisionConfig(
        encoder=layers_of(keys, source, layout, **others),
        final_norm=False,
        patch_bias=False,
        positions="rope",
        projector=projector,
        **patch_fields(keys, source),
    )


PIXTRAL_PIECES = {
    **{f"self_attn.{name}_proj": Piece(f"attention.{name}_proj") for name in "qkvo"},
    **{f"mlp.{name}_proj": Piece(f"feed_forward.{name}_proj") for name in ("gate", "up", "down")},
    "input_layernorm": Piece("attention_norm"),
    "post_attention_layernorm": Piece("ffn_norm"),
    "vision.patches": Piece("vision_tower.patch_conv"),
    "model.embed_norm": Piece("vision_tower.ln_pre"),
    "vision.projector.norm": Piece("multi_modal_projector.norm"),
}


QWEN_NAMES = {"num_hidden_layers": "depth", "num_attention_heads": "num_heads", "num_channels": "in_channels"}
"""Keys of Qwen-VL's vision_config that differ."""
QWEN_LAYERS = {
    "self_attn.o_proj": Piece("attn.proj"),
    "input_layernorm": Piece("norm1"),
    "post_attention_layernorm": Piece("norm2"),
}


def _qwen_vl(source: Source, keys: VisionKeys, pieces: Mapping[str, str], **others: Any) -> VisionConfig:
    """Patches in frames, which turn by their lines and columns; `pieces` are the names of its own tensors, and `others`
    fields of the layers that differ."""
    media, hidden = source.media, source.text.hidden_size
    assert isinstance(media, Qwen2VL), "the processor of another family"
    rope = Keys(keys.get("rope_parameters", dict, {}), {}, {})
    fields = {"rope_theta": rope.number("rope_theta", 10000.0), "max_position": 1, "rms_norm_eps": 1e-6, **others}
    encoder = layers_of(keys, source, Layout(), **fields)
    names = {"vision.patches": "patch_embed.proj", **pieces}
    outside = {name: Piece(f"visual.{tensor}") for name, tensor in names.items() if name.startswith("vision.")}
    inside = {name: Piece(tensor) for name, tensor in names.items() if not name.startswith("vision.")}
    layout = Layout("visual.blocks.{}.", qkv_slices(encoder, "attn.qkv") | QWEN_LAYERS | outside | inside)
    width = encoder.hidden_size * media.merge**2
    return VisionConfig(
        encoder=msgspec.structs.replace(encoder, layout=layout),
        final_norm=False,
        frames=media.temporal_patch,
        max_patches=media.max_patches,
        patch_bias=False,
        positions="rope",
        shares_frequencies=True,
        projector=Projector(
            merge=media.merge,
            norm=encoder.norm,
            matrices=[Matrix(num_outputs=width, bias=True, activation="gelu"), Matrix(num_outputs=hidden, bias=True)],
        ),
        **patch_fields(keys, source),
    )


def _image_size(media: MediaConfig) -> dict[str, int]:
    """What vision_config does not say: the sides of the longest image, which has a square on the other side."""
    assert isinstance(media, Qwen2VL)
    return {"image_size": media.max_patches // media.merge * media.patch, "patch_size": media.patch}


def _qwen2_vl(source: Source) -> VisionConfig:
    names = QWEN_NAMES | {"hidden_size": "embed_dim"}
    sizes = {"hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 16, "hidden_act": "quick_gelu"}
    keys = VisionKeys(source.vision_config, sizes | _image_size(source.media), names)
    pieces = {
        "vision.projector.norm": "merger.ln_q",
        "vision.projector.0": "merger.mlp.0",
        "vision.projector.1": "merger.mlp.2",
        "mlp.up_proj": "mlp.fc1",
        "mlp.down_proj": "mlp.fc2",
    }
    inner = int(keys.count("hidden_size") * keys.number("mlp_ratio", 4))
    return _qwen_vl(source, keys, pieces, intermediate_size=inner)


def _qwen2_5_vl(source: Source) -> VisionConfig:
    sizes = {"num_hidden_layers": 32, "num_attention_heads": 16, "hidden_act": "silu", "intermediate_size": 3420}
    media = source.media
    keys = VisionKeys(source.vision_config, sizes | _image_size(media), QWEN_NAMES)
    pieces = {
        "vision.projector.norm": "merger.ln_q",
        "vision.projector.0": "merger.mlp.0",
        "vision.projector.1": "merger.mlp.2",
    }
    vision = _qwen_vl(source, keys, pieces, norm="rms", norm_bias=False, gated=True)
    assert isinstance(media, Qwen2VL)
    side = keys.count("window_size", 112) // media.merge // media.patch
    if not side:
        raise keys.fault("window_size", f"at least {media.merge * media.patch}")
    full = keys.get("fullatt_block_indexes", list, [7, 15, 23, 31])
    if not all(type(layer) is int and layer >= 0 for layer in full):
        raise keys.fault("fullatt_block_indexes", "a list of layers")
    return msgspec.structs.replace(vision, windows=Windows(side=side, full_layers=full))


FAMILIES: dict[str, Callable[[Source], VisionConfig]] = {
    "idefics3": _idefics3,
    "smolvlm": _idefics3,
    "llava": _llava,
    "llava_onevision": _llava,
    "gemma3": _gemma3,
    "mistral3": _pixtral,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
}
"""By `model_type` of config.json. They raise ConfigFault and NotServed."""
