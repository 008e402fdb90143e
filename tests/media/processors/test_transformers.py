"""Pixels and ids are those of transformers' processors with Pillow."""

import importlib
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.pixtral import image_processing_pil_pixtral
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from pipeline.media import placeholders
from pipeline.media.processed import InvalidImage, ProcessedImage
from pipeline.media.processors import process
from tests.media.model_files import GEMMA3, IDEFICS3, LLAVA, ONEVISION, PIXTRAL, QWEN2_VL, TOKENIZER, Model, id_of
from tests.slices import part_of

EDGES = [(1, 1), (1, 40), (40, 1), (56, 56), (64, 64), (64, 128), (57, 56), (256, 256), (512, 3), (3, 512), (300, 90)]
NUM_RANDOM = part_of(300, 12)


def sizes(seed: int) -> list[tuple[int, int]]:
    """Widths and heights."""
    source = random.Random(seed)
    return EDGES + [
        (round(10 ** source.uniform(0.5, 2.9)), round(10 ** source.uniform(0.5, 2.9))) for _ in range(NUM_RANDOM)
    ]


def image_of(width: int, height: int) -> Image.Image:
    """Noise on a slope, so that each pixel is another and filters overshoot."""
    noise = np.random.default_rng(width * 10_000 + height).integers(0, 2, (height, width, 3)) * 120
    slope = np.linspace(0, 135, width)[None, :, None] + np.zeros((height, 1, 3))
    return Image.fromarray((noise + slope).astype(np.uint8))


def call(processor: Any, image: Image.Image) -> Any:
    """What a processor of transformers makes before it computes with floats."""
    return processor(image, do_rescale=False, do_normalize=False)


def merged(*changes: dict[str, Any], model: Model) -> Model:
    """A model with other values in its three files."""
    return Model(*({**before, **change} for before, change in zip(model, changes, strict=True)))


def settings(model: Model) -> dict[str, Any]:
    return {key: value for key, value in model.image_processor.items() if key != "image_processor_type"}


def check_ids(processed: ProcessedImage, placeholder: str, row_token: str, theirs: str) -> None:
    """The ids around and of an image are those of the text that transformers makes."""
    assert processed.pixels.flags.c_contiguous and processed.pixels.dtype == np.uint8
    rendered = f"User:\n{placeholder}\nWhat?\n\n{placeholder}"
    expected = TOKENIZER.encode(rendered.replace(placeholder, theirs), add_special_tokens=False).ids
    text, _ = placeholders.replace(rendered, None, placeholder, [processed.text] * 2)
    ids = np.array(TOKENIZER.encode(text, add_special_tokens=False).ids, np.int32)
    row_id = id_of(row_token)
    expanded, runs = placeholders.expand(ids, row_id, processed.run_lengths * 2)
    assert expanded.tolist() == expected
    in_runs = np.zeros(len(expanded), bool)
    for run in runs:
        in_runs[run.offset : run.offset + run.length] = True
    assert (in_runs == (expanded == row_id)).all()
    assert in_runs.sum() == 2 * processed.num_rows


@pytest.mark.parametrize(
    ("theirs", "changes"),
    [
        (SmolVLMImageProcessorPil, {}),
        (Idefics3ImageProcessorPil, {"image_processor_type": "Idefics3ImageProcessor"}),
        (SmolVLMImageProcessorPil, {"do_image_splitting": False}),
        (SmolVLMImageProcessorPil, {"size": {"longest_edge": 192}, "resample": 3}),
        (SmolVLMImageProcessorPil, {"do_resize": False}),
    ],
)
def test_idefics3_makes_the_same_tiles_and_ids(theirs: Any, changes: dict[str, Any], tmp_path: Path):
    model = merged({}, changes, {}, model=IDEFICS3)
    config, reference = model.read(tmp_path), theirs(**settings(model), return_row_col_info=True)
    names = SimpleNamespace(
        fake_image_token="<fake_token_around_image>",
        image_token="<image>",
        global_image_tag="<global-img>",
        image_seq_len=16,
    )
    for size in sizes(1):
        if changes.get("do_resize") is False and max(size) > 380:
            continue  # rows and columns above 6 have no token, and none of the models makes them
        image = image_of(*size)
        ours, made = process(image, config), call(reference, image)
        assert np.array_equal(ours.pixels, np.array(made["pixel_values"][0], np.uint8)), size
        assert ours.grid == (made["rows"][0][0], made["cols"][0][0])
        text = Idefics3Processor.replace_image_token(names, {"rows": made["rows"], "cols": made["cols"]}, 0)
        check_ids(ours, "<image>", "<image>", text)


@pytest.mark.parametrize(
    ("theirs", "changes"),
    [
        (CLIPImageProcessorPil, {}),
        (CLIPImageProcessorPil, {"size": 56, "crop_size": 56}),
        (CLIPImageProcessorPil, {"size": {"shortest_edge": 40}}),
        (CLIPImageProcessorPil, {"size": {"height": 56, "width": 56}, "do_center_crop": False}),
        (
            SiglipImageProcessorPil,
            {"size": {"height": 56, "width": 56}, "image_processor_type": "SiglipImageProcessor"},
        ),
        (LlavaImageProcessorPil, {"do_pad": True, "image_processor_type": "LlavaImageProcessorFast"}),
        (LlavaImageProcessorPil, {"image_processor_type": "LlavaImageProcessor", "resample": 2}),
    ],
)
def test_llava_makes_the_same_image_and_ids(theirs: Any, changes: dict[str, Any], tmp_path: Path):
    model = merged({}, changes, {}, model=LLAVA)
    config, reference = model.read(tmp_path), theirs(**settings(model))
    names = SimpleNamespace(
        patch_size=14, num_additional_image_tokens=1, vision_feature_select_strategy="default", image_token="<image>"
    )
    for size in sizes(2):
        image = image_of(*size)
        ours, made = process(image, config), call(reference, image)["pixel_values"]
        assert np.array_equal(ours.pixels, np.array(made)), size
        check_ids(ours, "<image>", "<image>", LlavaProcessor.replace_image_token(names, {"pixel_values": made}, 0))


def test_llava_onevision_makes_the_same_tiles_and_ids(tmp_path: Path):
    config = ONEVISION.read(tmp_path)
    reference = LlavaOnevisionImageProcessorPil(**settings(ONEVISION))
    names = LlavaOnevisionProcessor.__new__(LlavaOnevisionProcessor)
    names.num_image_tokens, names.vision_feature_select_strategy = 16, "full"
    names.vision_aspect_ratio, names.image_processor, names.image_token = "anyres_max_4", reference, "<image>"
    for size in sizes(3):
        image = image_of(*size)
        ours, made = process(image, config), call(reference, image)
        assert np.array_equal(ours.pixels, made["pixel_values"][0]), size
        check_ids(ours, "<image>", "<image>", names.replace_image_token(made, 0))


@pytest.mark.parametrize("crops", [False, True])
def test_gemma3_makes_the_same_crops_and_ids(crops: bool, tmp_path: Path):
    values = {"pan_and_scan_min_crop_size": 50, "pan_and_scan_max_num_crops": 4, "do_pan_and_scan": crops}
    model = merged({}, {**values, "pan_and_scan_min_ratio_to_activate": 1.2}, {}, model=GEMMA3)
    config, reference = model.read(tmp_path), Gemma3ImageProcessorPil(**settings(model))
    rows = "<image_soft_token>" * 16
    names = SimpleNamespace(full_image_sequence=f"\n\n<start_of_image>{rows}<end_of_image>\n\n")
    for size in sizes(4):
        image = image_of(*size)
        ours, made = process(image, config), call(reference, image)
        assert np.array_equal(ours.pixels, np.array(made["pixel_values"])), size
        text = Gemma3Processor.replace_image_token(names, made, 0)
        check_ids(ours, "<start_of_image>", "<image_soft_token>", text)


@pytest.mark.parametrize(
    ("config_changes", "changes"),
    [
        ({}, {}),
        (
            {"model_type": "qwen3_vl", "vision_config": {"patch_size": 16}},
            {
                "patch_size": 16,
                "size": {"shortest_edge": 65536, "longest_edge": 200000},
                "min_pixels": None,
                "max_pixels": None,
            },
        ),
        (
            {"model_type": "qwen3_5", "vision_config": {"patch_size": 16}},
            {
                "patch_size": 16,
                "image_mean": [0.5, 0.5, 0.5],
                "image_std": [0.5, 0.5, 0.5],
                "size": {"shortest_edge": 65536, "longest_edge": 16777216},
                "min_pixels": None,
                "max_pixels": None,
            },
        ),
    ],
    ids=["qwen2_5_vl", "qwen3_vl", "qwen3_5"],
)
def test_qwen2_vl_makes_the_same_patches_and_ids(
    config_changes: dict[str, Any], changes: dict[str, Any], tmp_path: Path
):
    model = merged(config_changes, changes, {}, model=QWEN2_VL)
    config, reference = model.read(tmp_path), Qwen2VLImageProcessorPil(**settings(model))
    names = SimpleNamespace(image_processor=reference, image_token="<|image_pad|>")
    for size in sizes(5):
        image = image_of(*size)
        if max(size) > 200 * min(size):
            with pytest.raises(InvalidImage, match="at most 200 times"):
                process(image, config)
            with pytest.raises(ValueError, match="must be smaller than 200"):
                call(reference, image)
            continue
        ours, made = process(image, config), call(reference, image)
        frames = np.repeat(ours.pixels[:, :, None], 2, axis=2)  # [patches, 3, 2, patch, patch]
        assert np.array_equal(frames.reshape(len(frames), -1), made["pixel_values"]), size
        assert list(ours.grid) == made["image_grid_thw"][0].tolist()
        check_ids(ours, "<|image_pad|>", "<|image_pad|>", Qwen2VLProcessor.replace_image_token(names, made, 0))


@pytest.mark.parametrize("merge", [1, 2])
def test_pixtral_makes_the_same_image_and_ids(merge: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # The processor imports the image processor that needs torchvision, which is not among the dependencies.
    stand_in = "transformers.models.pixtral.image_processing_pixtral"
    monkeypatch.setitem(sys.modules, stand_in, image_processing_pil_pixtral)
    processing = importlib.import_module("transformers.models.pixtral.processing_pixtral")
    kind = "llava" if merge == 1 else "mistral3"
    model = merged({"model_type": kind}, {}, {"spatial_merge_size": merge}, model=PIXTRAL)
    config = model.read(tmp_path)
    reference = PixtralImageProcessorPil(**{**settings(model), "patch_size": 14 * merge})
    names = SimpleNamespace(
        patch_size=14,
        spatial_merge_size=merge,
        image_token="[IMG]",
        image_break_token="[IMG_BREAK]",
        image_end_token="[IMG_END]",
    )
    for size in sizes(6):
        image = image_of(*size)
        if max(size) > 280 and min(size) * 280 < max(size):  # no line of pixels is left: transformers fails, too
            with pytest.raises(InvalidImage):
                process(image, config)
            continue
        ours, made = process(image, config), call(reference, image)
        assert np.array_equal(ours.pixels, np.array(made["pixel_values"])), size
        check_ids(ours, "[IMG]", "[IMG]", processing.PixtralProcessor.replace_image_token(names, made, 0))


def test_real_sizes_of_smolvlm_and_llava(tmp_path: Path):
    smol = merged(
        {"vision_config": {"image_size": 512, "patch_size": 16}, "scale_factor": 4},
        {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}},
        {"image_seq_len": 64},
        model=IDEFICS3,
    )
    llava = merged(
        {"vision_config": {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}},
        {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
        {},
        model=LLAVA,
    )
    for size in ((1280, 720), (333, 1000)):
        image = image_of(*size)
        for name, model, theirs in (("s", smol, SmolVLMImageProcessorPil), ("l", llava, CLIPImageProcessorPil)):
            ours = process(image, model.read(tmp_path / name))
            made = np.array(call(theirs(**settings(model)), image)["pixel_values"])
            assert np.array_equal(ours.pixels, made.reshape(ours.pixels.shape))


def test_the_tokenizer_of_the_tests_merges_line_feeds_as_gemma_s_does():
    fast = PreTrainedTokenizerFast(tokenizer_object=TOKENIZER)
    assert len(fast("\n\n\n", add_special_tokens=False)["input_ids"]) == 1
