"""Small models for texts and images: the JSON files that say how images are processed, and a tokenizer."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from pipeline.media.config import MediaConfig
from pipeline.stages.prepare.media import media_config

TOKENS = [
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{line}_col_{column}>" for line in range(1, 7) for column in range(1, 7)),
    "<start_of_image>",
    "<end_of_image>",
    "<image_soft_token>",
    "<|image_pad|>",
    "[IMG]",
    "[IMG_BREAK]",
    "[IMG_END]",
]


def tokenizer() -> Tokenizer:
    """Bytes, pairs of line feeds, and the special tokens of all families."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    for word in ("ĊĊ", "ĊĊĊ", "ĊĊĊĊ"):
        vocab[word] = len(vocab)
    made = Tokenizer(models.BPE(vocab, [("Ċ", "Ċ"), ("ĊĊ", "Ċ"), ("ĊĊ", "ĊĊ")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in TOKENS])
    return made


TOKENIZER = tokenizer()


def id_of(token: str) -> int:
    number = TOKENIZER.token_to_id(token)
    assert number is not None
    return number


class Model(NamedTuple):
    config: dict[str, Any]
    image_processor: dict[str, Any]
    processor: dict[str, Any]

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        names = ("config.json", "preprocessor_config.json", "processor_config.json")
        for name, value in zip(names, self, strict=True):
            (folder / name).write_text(json.dumps(value))
        return folder

    def read(self, folder: Path) -> MediaConfig:
        found = media_config.read(self.write(folder), self.config, TOKENIZER)
        assert found is not None
        return found


IDEFICS3 = Model(
    {
        "model_type": "smolvlm",
        "image_token_id": id_of("<image>"),
        "scale_factor": 2,
        "vision_config": {"image_size": 64, "patch_size": 8},
    },
    {
        "image_processor_type": "SmolVLMImageProcessor",
        "do_image_splitting": True,
        "size": {"longest_edge": 256},
        "max_image_size": {"longest_edge": 64},
        "resample": 1,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "rescale_factor": 0.00392156862745098,
    },
    {"image_seq_len": 16, "processor_class": "SmolVLMProcessor"},
)
LLAVA = Model(
    {
        "model_type": "llava",
        "image_token_index": id_of("<image>"),
        "vision_feature_select_strategy": "default",
        "vision_config": {"model_type": "clip_vision_model", "image_size": 56, "patch_size": 14},
    },
    {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 56},
        "crop_size": {"height": 56, "width": 56},
        "resample": 3,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    },
    {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
)
ONEVISION = Model(
    {
        "model_type": "llava_onevision",
        "image_token_index": id_of("<image>"),
        "vision_aspect_ratio": "anyres_max_4",
        "vision_config": {"model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14},
    },
    {
        "image_processor_type": "LlavaOnevisionImageProcessor",
        "size": {"height": 56, "width": 56},
        "image_grid_pinpoints": [[56 * lines, 56 * columns] for lines in range(1, 5) for columns in range(1, 5)],
    },
    {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
)
GEMMA3 = Model(
    {
        "model_type": "gemma3",
        "boi_token_index": id_of("<start_of_image>"),
        "eoi_token_index": id_of("<end_of_image>"),
        "image_token_index": id_of("<image_soft_token>"),
        "mm_tokens_per_image": 16,
        "vision_config": {"model_type": "siglip_vision_model", "image_size": 112, "patch_size": 14},
    },
    {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": 112, "width": 112},
        "resample": 2,
        "do_pan_and_scan": None,
    },
    {"image_seq_length": 16},
)
QWEN2_VL = Model(
    {
        "model_type": "qwen2_5_vl",
        "image_token_id": id_of("<|image_pad|>"),
        "vision_config": {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
    },
    {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": 3136,
        "max_pixels": 100000,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
    },
    {},
)
PIXTRAL = Model(
    {
        "model_type": "mistral3",
        "image_token_index": id_of("[IMG]"),
        "spatial_merge_size": 2,
        "vision_config": {"model_type": "pixtral", "image_size": 1540, "patch_size": 14},
    },
    {"image_processor_type": "PixtralImageProcessorFast", "size": {"longest_edge": 280}, "patch_size": 14},
    {"patch_size": 14, "spatial_merge_size": 2},
)
