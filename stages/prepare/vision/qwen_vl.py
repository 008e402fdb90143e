"""The vision towers of Qwen-VL: patches of images of any shape, which turn by their lines and columns."""

from collections.abc import Mapping, Sequence
from math import isqrt
from typing import Any

import msgspec

from pipeline.media.config import MediaConfig, Qwen2VL
from pipeline.runtime.model.model_config import Layout, Piece
from pipeline.runtime.model.vision_config import LayerRows, Matrix, Projector, VisionConfig, Windows
from pipeline.stages.prepare.families.architecture import qkv_slices
from pipeline.stages.prepare.families.keys import Keys
from pipeline.stages.prepare.vision.tower_source import Source, VisionKeys, layers_of, patch_fields

QWEN_NAMES = {"num_hidden_layers": "depth", "num_attention_heads": "num_heads", "num_channels": "in_channels"}
"""Keys of Qwen-VL's vision_config that differ."""
QWEN_LAYERS = {
    "self_attn.o_proj": Piece("attn.proj"),
    "input_layernorm": Piece("norm1"),
    "post_attention_layernorm": Piece("norm2"),
}


MERGER = {
    "vision.projector.norm": "merger.ln_q",
    "vision.projector.0": "merger.mlp.0",
    "vision.projector.1": "merger.mlp.2",
}
"""The projector's tensors in Qwen2-VL and Qwen2.5-VL."""


def _tower(source: Source, keys: VisionKeys, pieces: Mapping[str, str], **others: Any) -> VisionConfig:
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


def qwen2_vl(source: Source) -> VisionConfig:
    names = QWEN_NAMES | {"hidden_size": "embed_dim"}
    sizes = {"hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 16, "hidden_act": "quick_gelu"}
    keys = VisionKeys(source.vision_config, sizes | _image_size(source.media), names)
    pieces = {**MERGER, "mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"}
    inner = int(keys.count("hidden_size") * keys.number("mlp_ratio", 4))
    return _tower(source, keys, pieces, intermediate_size=inner)


def qwen2_5_vl(source: Source) -> VisionConfig:
    sizes = {"num_hidden_layers": 32, "num_attention_heads": 16, "hidden_act": "silu", "intermediate_size": 3420}
    media = source.media
    keys = VisionKeys(source.vision_config, sizes | _image_size(media), QWEN_NAMES)
    vision = _tower(source, keys, MERGER, norm="rms", norm_bias=False, gated=True)
    assert isinstance(media, Qwen2VL)
    side = keys.count("window_size", 112) // media.merge // media.patch
    if not side:
        raise keys.fault("window_size", f"at least {media.merge * media.patch}")
    full = keys.get("fullatt_block_indexes", list, [7, 15, 23, 31])
    if not all(type(layer) is int and layer >= 0 for layer in full):
        raise keys.fault("fullatt_block_indexes", "a list of layers")
    return msgspec.structs.replace(vision, windows=Windows(side=side, full_layers=full))


def qwen3_vl(source: Source, deepstack: Sequence[int] = ()) -> VisionConfig:
    """Qwen3-VL and Qwen3.5. `deepstack` are the layers whose results the language model adds, if the file does not say
    them."""
    sizes = {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": list(deepstack),
    }
    keys = VisionKeys(source.vision_config, sizes | _image_size(source.media), QWEN_NAMES)
    num = keys.count("num_position_embeddings")
    if isqrt(num) ** 2 != num:
        raise keys.fault("num_position_embeddings", "a square")
    depth, layers = keys.count("num_hidden_layers"), keys.get("deepstack_visual_indexes", list)
    if not all(type(layer) is int and 0 <= layer < depth for layer in layers) or layers != sorted(set(layers)):
        raise keys.fault("deepstack_visual_indexes", f"a list of some of the {depth} layers, in rising order")
    mergers = {"vision.projector": "merger"} | {
        f"vision.layer_rows.{i}": f"deepstack_merger_list.{i}" for i in range(len(layers))
    }
    tensors = {"norm": "norm", "0": "linear_fc1", "1": "linear_fc2"}
    pieces = {f"{ours}.{one}": f"{merger}.{name}" for ours, merger in mergers.items() for one, name in tensors.items()}
    pieces |= {"mlp.up_proj": "mlp.linear_fc1", "mlp.down_proj": "mlp.linear_fc2", "vision.positions": "pos_embed"}
    vision = _tower(source, keys, pieces, max_position=num)
    of_layer = msgspec.structs.replace(vision.projector, norms_squares=True)
    return msgspec.structs.replace(
        vision,
        patch_bias=True,
        interpolates=True,
        layer_rows=LayerRows(layers=layers, projectors=[of_layer] * len(layers)),
    )
