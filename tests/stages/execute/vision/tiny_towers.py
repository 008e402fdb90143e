"""Tiny random models for texts and images, made by transformers from a config and prepared from their folders."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer
from transformers import AutoConfig, AutoModelForImageTextToText

from pipeline.config.settings import Settings
from pipeline.runtime.model.vision_config import VisionConfig
from pipeline.stages.execute.cpu.backend import choose_library
from pipeline.stages.execute.cpu.vision import MediaItem, VisionEncoder
from pipeline.stages.execute.vision.tower import computed_config
from pipeline.stages.prepare.stage import prepare
from tests.media.model_files import TOKENS
from tests.stages.prepare import checkpoints

TEXT = {
    "model_type": "llama",
    "vocab_size": 608,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SCALE, MEAN, STD = 1 / 255, [0.481, 0.458, 0.408], [0.269, 0.261, 0.276]
PREPROCESSOR = {
    "do_rescale": True,
    "rescale_factor": SCALE,
    "do_normalize": True,
    "image_mean": MEAN,
    "image_std": STD,
}


def _idefics3(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Smaller images are padded at the right and below, as its image processor does, and their rows cut out."""
    vision, merge = model.config.vision_config, model.config.scale_factor
    num, _, height, width = pixels.shape
    side, step = vision.image_size, vision.patch_size * merge
    padded, mask = torch.zeros(1, num, 3, side, side), torch.zeros(1, num, side, side, dtype=torch.bool)
    padded[0, :, :, :height, :width] = pixels
    mask[0, :, :height, :width] = True
    rows = torch.cat(list(model.get_image_features(padded, mask).pooler_output))
    grid = rows.view(num, side // step, side // step, -1)[:, : height // step, : width // step]
    return grid.reshape(num, -1, rows.shape[-1])


@dataclass(frozen=True)
class Variant:
    kind: str
    vision: dict[str, Any]
    changes: dict[str, Any] = field(default_factory=dict)
    """Of the whole config."""
    theirs: Callable[[Any, torch.Tensor], torch.Tensor] = _idefics3
    """transformers' rows of pixels [tiles, channels, height, width]: [tiles, rows, width]."""
    sizes: Sequence[tuple[int, int]] = ((48, 48),)
    """Heights and widths of images."""
    processor: dict[str, Any] = field(default_factory=lambda: {"image_processor_type": "Idefics3ImageProcessor"})
    """Of preprocessor_config.json."""


def _tiles(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    return torch.stack(list(model.get_image_features(pixels).pooler_output))


def _of_sizes(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    sizes = torch.tensor([pixels.shape[2:]] * len(pixels))
    found = model.get_image_features(pixels, sizes)
    return torch.cat(list(found.pooler_output))


def _of_sizes_llava(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    sizes = torch.tensor([pixels.shape[2:]] * len(pixels))
    return torch.cat(list(model.get_image_features(pixels, image_sizes=sizes).pooler_output))


def _processor(kind: str, **others: Any) -> dict[str, Any]:
    size = {"height": 48, "width": 48}
    return {"image_processor_type": f"{kind}ImageProcessor", "size": size, "crop_size": size, **others}


SIGLIP = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 48,
    "patch_size": 8,
}
OF_SIGLIP = {**SIGLIP, "model_type": "siglip_vision_model"}
RESOLUTIONS = [[48 * lines, 48 * columns] for lines in (1, 2, 3) for columns in (1, 2, 3)]
GEMMA3_TEXT = {
    **TEXT,
    "model_type": "gemma3_text",
    "head_dim": 16,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention"],
}
QWEN2 = {**TEXT, "model_type": "qwen2"}
VARIANTS: dict[str, Variant] = {
    "idefics3": Variant("idefics3", SIGLIP, {"scale_factor": 2}, sizes=((48, 48), (48, 16), (32, 48), (16, 16))),
    "smolvlm, padded heads": Variant(
        "smolvlm", {**SIGLIP, "num_attention_heads": 2, "hidden_act": "gelu"}, {"scale_factor": 3}
    ),
    "llava": Variant(
        "llava", {**SIGLIP, "model_type": "clip_vision_model"}, theirs=_tiles, processor=_processor("CLIP")
    ),
    "llava, siglip": Variant(
        "llava",
        OF_SIGLIP,
        {"vision_feature_layer": -1, "vision_feature_select_strategy": "full", "multimodal_projector_bias": False},
        theirs=_tiles,
        processor=_processor("Siglip"),
    ),
    "gemma3": Variant(
        "gemma3",
        {**OF_SIGLIP, "num_attention_heads": 2},
        {"text_config": GEMMA3_TEXT, "mm_tokens_per_image": 9},
        theirs=_tiles,
        processor=_processor("Gemma3"),
    ),
    "mistral3": Variant(
        "mistral3",
        {**SIGLIP, "model_type": "pixtral", "hidden_act": "silu"},
        {"text_config": {**TEXT, "model_type": "mistral"}},
        theirs=_of_sizes,
        sizes=((48, 48), (16, 48), (32, 16)),
        processor=_processor("Pixtral"),
    ),
    "llava, pixtral, padded heads": Variant(
        "llava",
        {**SIGLIP, "model_type": "pixtral", "num_attention_heads": 2},
        {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        theirs=_of_sizes_llava,
        sizes=((48, 48), (8, 40)),
        processor=_processor("Pixtral"),
    ),
}
"""Those whose rows are the rows of the tiles."""
ONEVISION = Variant(
    "llava_onevision",
    OF_SIGLIP,
    {
        "text_config": QWEN2,
        "image_grid_pinpoints": RESOLUTIONS,
        "vision_aspect_ratio": "anyres_max_2",
    },
    processor=_processor("LlavaOnevision", image_grid_pinpoints=RESOLUTIONS),
)


def make(variant: Variant, seed: int = 0) -> Any:
    """The model in transformers, float32, whose hidden states differ enough to detect errors."""
    parts = {"text_config": TEXT, "vision_config": variant.vision}
    config = AutoConfig.for_model(variant.kind, **{**parts, **variant.changes})
    model = AutoModelForImageTextToText.from_config(config)
    checkpoints.randomize(model, seed)
    if variant.kind == "gemma3":  # it multiplies embeddings by 8: each id would follow itself
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(0.125)
    return model.eval()


MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
QWEN_PIXELS = {"shortest_edge": 16 * 16, "longest_edge": 48 * 80}
QWEN_VISION = {"depth": 3, "num_heads": 3, "patch_size": 8, "hidden_size": 48}
QWEN3_VISION = {**QWEN_VISION, "intermediate_size": 96, "out_hidden_size": 64, "num_position_embeddings": 25}
QWEN3_TEXT = {
    **TEXT,
    "head_dim": 16,
    "rope_parameters": {**MROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
}
QWEN3_5_TEXT = {
    **TEXT,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "rope_parameters": {
        **MROPE,
        "partial_rotary_factor": 0.5,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}


def _qwen(kind: str, vision: dict[str, Any], text: dict[str, Any]) -> Variant:
    read = _processor("Qwen2VL", size=QWEN_PIXELS, patch_size=8)
    return Variant(kind, vision, {"text_config": {**text, "model_type": f"{kind}_text"}}, processor=read)


QWEN2_TEXT = {**TEXT, "rope_parameters": MROPE}
QWEN2_VISION = {**QWEN_VISION, "embed_dim": 48, "hidden_size": 64}
QWEN2_5_VISION = {
    **QWEN_VISION,
    "intermediate_size": 96,
    "out_hidden_size": 64,
    "window_size": 32,
    "fullatt_block_indexes": [1],
}
QWEN: dict[str, Variant] = {
    "qwen2_vl": _qwen("qwen2_vl", {**QWEN2_VISION, "mlp_ratio": 2}, QWEN2_TEXT),
    "qwen2_vl, padded heads": _qwen("qwen2_vl", {**QWEN2_VISION, "num_heads": 2, "hidden_act": "gelu"}, QWEN2_TEXT),
    "qwen2_5_vl": _qwen("qwen2_5_vl", QWEN2_5_VISION, QWEN2_TEXT),
    "qwen2_5_vl, large windows": _qwen(
        "qwen2_5_vl",
        {**QWEN2_5_VISION, "num_heads": 2, "window_size": 48, "fullatt_block_indexes": [0, 2]},
        QWEN2_TEXT,
    ),
    "qwen3_vl": _qwen("qwen3_vl", {**QWEN3_VISION, "deepstack_visual_indexes": [0]}, QWEN3_TEXT),
    "qwen3_vl, deepstack": _qwen(
        "qwen3_vl",
        {**QWEN3_VISION, "num_heads": 2, "deepstack_visual_indexes": [0, 2]},
        {**QWEN3_TEXT, "num_hidden_layers": 3},
    ),
    "qwen3_5": _qwen("qwen3_5", QWEN3_VISION, QWEN3_5_TEXT),
    "qwen3_5_moe": _qwen(
        "qwen3_5_moe",
        QWEN3_VISION,
        {
            **QWEN3_5_TEXT,
            "num_experts": 3,  # all: in bfloat16, others could be chosen
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
        },
    ),
}
"""Those whose images come as patches."""


GEMMA3_TOKENS = {"boi": "<start_of_image>", "eoi": "<end_of_image>"}


def save(folder: Path, variant: Variant, model: Any) -> Path:
    """A folder of the model as transformers writes it."""
    source = checkpoints.save_folder(
        folder / "source", model, tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast"}
    )
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in TOKENS])
    tokenizer.save(str(source / "tokenizer.json"))
    ids = {f"image_token_{end}": tokenizer.token_to_id("<image>") for end in ("id", "index")}
    ids |= {f"{name}_token_index": tokenizer.token_to_id(token) for name, token in GEMMA3_TOKENS.items()}
    checkpoints.edit_config(source, **ids)
    (source / "preprocessor_config.json").write_text(json.dumps({**PREPROCESSOR, **variant.processor}))
    return source


def prepared(folder: Path, source: Path, **others: Any) -> Path:
    return prepare(Settings(model=str(source), cache_dir=str(folder / "cache"), **others))


def images(num: int, height: int, width: int, seed: int = 0) -> np.ndarray:
    """uint8 [num, 3, height, width]: noise over a gradient, so that means differ."""
    random = np.random.default_rng([seed, height, width])
    gradient = np.linspace(0, 120, width)
    noise: np.ndarray = random.integers(0, 136, (num, 3, height, width))
    return (noise + gradient).astype(np.uint8)


def normalized(pixels: np.ndarray) -> torch.Tensor:
    """What transformers' tower reads: [num, 3, height, width] float32."""
    values = torch.from_numpy(pixels).double() * SCALE
    mean, std = (torch.tensor(each, dtype=torch.float64) for each in (MEAN, STD))
    return ((values - mean[:, None, None]) / std[:, None, None]).float()


def encoder(folder: Path, settings: Settings) -> VisionEncoder:
    """The tower of a prepared folder, in torch or in the CPU library."""
    vision = VisionConfig.load(folder)
    assert vision is not None
    library = choose_library(settings, computed_config(vision)) if settings.execute.kernels != "torch" else None
    return VisionEncoder(settings, folder, vision, 1, library)


def encode(tower: VisionEncoder, *pixels: np.ndarray) -> list[np.ndarray]:
    """The rows of each item, [rows, width]."""
    items = [MediaItem(each) for each in pixels]
    sizes = [len(item.pixels) * tower.num_tile_rows(item) for item in items]
    out = [np.full((size, tower.config.hidden_size), np.nan, np.float32) for size in sizes]
    tower.encode(items, out)
    return out
