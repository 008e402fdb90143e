"""Values of `vision_config` that transformers' classes have if a file lacks them."""

from typing import Any

CLIP, SIGLIP_KIND, PIXTRAL = "clip_vision_model", "siglip_vision_model", "pixtral"
"""Kinds of towers: `model_type` of vision_config."""

BASE = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
}
TOWER_DEFAULTS: dict[str, dict[str, Any]] = {
    CLIP: {**BASE, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
    SIGLIP_KIND: {**BASE, "patch_size": 16},
    PIXTRAL: {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 1024,
        "patch_size": 16,
        "hidden_act": "gelu",
    },
}
IDEFICS3_DEFAULTS: dict[str, Any] = {**BASE, "hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
"""Of Idefics3's and SmolVLM's towers, which go by several names."""
