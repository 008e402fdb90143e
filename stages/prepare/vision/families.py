"""The families of vision towers: how each reads config.json. Defaults are those of transformers.

Layers have SigLIP's form, with differences that are fields of the tower's `ModelConfig`.
"""

from collections.abc import Callable
from functools import partial
from math import isqrt

from pipeline.media.config import LlavaOnevision
from pipeline.runtime.model.model_config import Layout, Piece
from pipeline.runtime.model.vision_config import Anyres, Matrix, Projector, VisionConfig
from pipeline.stages.prepare.families.architecture import renamed
from pipeline.stages.prepare.families.keys import Keys
from pipeline.stages.prepare.files import shown
from pipeline.stages.prepare.vision.qwen_vl import qwen2_5_vl, qwen2_vl, qwen3_vl
from pipeline.stages.prepare.vision.tower_defaults import (
    CLIP,
    IDEFICS3_DEFAULTS,
    PIXTRAL,
    SIGLIP_KIND,
    TOWER_DEFAULTS,
)
from pipeline.stages.prepare.vision.tower_source import (
    SIGLIP_LAYERS,
    NotServed,
    Source,
    VisionKeys,
    activation_of,
    layers_of,
    patch_fields,
)


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


FAMILIES: dict[str, Callable[[Source], VisionConfig]] = {
    "idefics3": _idefics3,
    "smolvlm": _idefics3,
    "llava": _llava,
    "llava_onevision": _llava,
    "gemma3": _gemma3,
    "mistral3": _pixtral,
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_5": qwen3_vl,
    "qwen3_5_moe": qwen3_vl,
    "qwen3_vl": partial(qwen3_vl, deepstack=(8, 16, 24)),
}
"""By `model_type` of config.json. They raise ConfigFault and NotServed."""
