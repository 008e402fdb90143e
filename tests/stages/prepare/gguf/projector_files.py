"""Writes models for texts and images as two .gguf files, as llama.cpp's converters do."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer
from transformers import AutoModelForCausalLM

from tests.media.model_files import TOKENS
from tests.stages.execute.vision.tiny_towers import MEAN, STD
from tests.stages.prepare import checkpoints

NAMES = {
    "vision_tower.transformer.layers.": "v.blk.",
    "vision_tower.encoder.layers.": "v.blk.",
    "vision_model.encoder.layers.": "v.blk.",
    "embeddings.patch_embedding": "v.patch_embd",
    "embeddings.position_embedding": "v.position_embd",
    "embeddings.class_embedding": "v.class_embd",
    "patch_conv": "v.patch_embd",
    "pre_layrnorm": "v.pre_ln",
    "ln_pre": "v.pre_ln",
    "post_layernorm": "v.post_ln",
    "vision_tower.": "",
    "vision_model.": "",
    "self_attn.": "",
    "attention.": "",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "out_proj": "attn_out",
    "o_proj": "attn_out",
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "attention_norm": "ln1",
    "ffn_norm": "ln2",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down",
    "connector.modality_projection.proj": "mm.model.fc",
    "multi_modal_projector.patch_merger.merging_layer": "mm.patch_merger",
    "multi_modal_projector.norm": "mm.input_norm",
}
"""What becomes of parts of transformers' names, in this order."""
PROJECTORS = {"idefics3": "idefics3", "smolvlm": "idefics3", "llava": "mlp", "mistral3": "pixtral"}


def projector_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The tensors of a tower by the names of .gguf files."""
    vision = model.config.vision_config
    is_pixtral = vision.model_type == "pixtral"
    linear = ("mm.1", "mm.2") if is_pixtral else ("mm.0", "mm.2")
    found = {}
    for name, tensor in model.model.state_dict().items():
        if name.startswith(("language_model.", "text_model.", "vision_tower.head.")):
            continue
        for part, own in {
            **NAMES,
            "multi_modal_projector.linear_1": linear[0],
            "multi_modal_projector.linear_2": linear[1],
        }.items():
            name = name.replace(part, own)
        if is_pixtral and ("attn_q" in name or "attn_k" in name):
            heads = vision.num_attention_heads
            tensor = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        found[name] = tensor
    return found


def metadata_of(model: Any) -> dict[str, Any]:
    """The keys of a tower."""
    config, vision = model.config, model.config.vision_config
    is_pixtral = vision.model_type == "pixtral"
    keys: dict[str, Any] = {
        "clip.has_vision_encoder": True,
        "clip.projector_type": "pixtral" if is_pixtral else PROJECTORS[config.model_type],
        "clip.vision.image_size": vision.image_size,
        "clip.vision.patch_size": vision.patch_size,
        "clip.vision.embedding_length": vision.hidden_size,
        "clip.vision.feed_forward_length": vision.intermediate_size,
        "clip.vision.block_count": vision.num_hidden_layers,
        "clip.vision.attention.head_count": vision.num_attention_heads,
        "clip.vision.attention.layer_norm_epsilon": float(getattr(vision, "layer_norm_eps", 1e-5)),
        "clip.vision.image_mean": MEAN,
        "clip.vision.image_std": STD,
        "clip.use_gelu": vision.hidden_act.startswith("gelu"),
        "clip.use_silu": vision.hidden_act == "silu",
    }
    if config.model_type in ("idefics3", "smolvlm"):
        keys |= {
            "clip.vision.projector.scale_factor": config.scale_factor,
            "clip.vision.preproc_image_size": 2 * vision.image_size,
        }
    elif config.model_type == "mistral3":
        keys["clip.vision.spatial_merge_size"] = config.spatial_merge_size
    elif vision.model_type == "clip_vision_model":
        num_layers = vision.num_hidden_layers + 1 + config.vision_feature_layer
        keys |= {"clip.vision.block_count": num_layers, "clip.vision.feature_layer": [num_layers]}
    return keys


def save_projector(
    path: Path,
    model: Any,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    changes: Mapping[str, Any] | None = None,
    renamed: Mapping[str, str] | None = None,
    without: str = "",
    architecture: str = "clip",
) -> Path:
    """A .gguf file of a model's tower, whose matrices are stored as `kind`. `changes` are keys that differ, None if one
    is missing."""
    writer = gguf.GGUFWriter(path, architecture)
    keys = metadata_of(model) | dict(changes or {})
    for key, value in keys.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    num_layers = metadata_of(model)["clip.vision.block_count"]
    for name, tensor in projector_tensors(model).items():
        is_dropped = name.startswith("v.blk.") and int(name.split(".")[2]) >= num_layers
        is_dropped |= (keys["clip.projector_type"] == "mlp" and name.startswith("v.post_ln")) or name == without
        if is_dropped:
            continue
        for own, other in (renamed or {}).items():
            if own in name:
                name = name.replace(own, other)
                break
        values = tensor.float().contiguous().numpy()
        if values.ndim > 1:
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def language_model(model: Any) -> Any:
    """The language model of a model for texts and images."""
    text = AutoModelForCausalLM.from_config(model.config.get_text_config())
    text.model.load_state_dict(
        (model.model.language_model if hasattr(model.model, "language_model") else model.model.text_model).state_dict()
    )
    text.lm_head.load_state_dict(model.lm_head.state_dict())
    return text.eval()


def save_language_model(path: Path, model: Any, **others: Any) -> Path:
    """A .gguf file of the language model. Its vocabulary has the tokens of images."""
    tokenizer = checkpoints.byte_level()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in TOKENS])
    return checkpoints.save_gguf(path, language_model(model), tokenizer=tokenizer, **others)


def token_id(folder: Path, token: str) -> int:
    number: int | None = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(token)
    assert number is not None
    return number
