"""What the families of vision towers have in common: the files that they read, and layers of SigLIP's form."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.media.config import MediaConfig
from pipeline.runtime.model.model_config import Activation, Layout, ModelConfig, Piece
from pipeline.runtime.model.vision_config import Pixels
from pipeline.stages.prepare.families.keys import ACTIVATIONS, Keys
from pipeline.stages.prepare.files import shown

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
