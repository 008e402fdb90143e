"""`media.json`: what prepare reads of the files of processors, and its errors."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.media import config as media
from pipeline.media.config import MAX_PATCHES, Gemma3, Idefics3, Llava, PanAndScan, Pixtral, Qwen2VL
from pipeline.stages.prepare.media import media_config
from pipeline.stages.prepare.sources.source import ModelError
from tests.media.model_files import GEMMA3, IDEFICS3, LLAVA, ONEVISION, PIXTRAL, QWEN2_VL, TOKENIZER, Model, id_of

MODELS = {
    "idefics3": IDEFICS3,
    "llava": LLAVA,
    "llava_onevision": ONEVISION,
    "gemma3": GEMMA3,
    "qwen2_vl": QWEN2_VL,
    "pixtral": PIXTRAL,
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_media_json_holds_what_was_read(model: Model, tmp_path: Path):
    notes = media_config.add_to_folder(model.write(tmp_path), model.config, TOKENIZER, tmp_path)
    assert notes == []
    assert media.load(tmp_path) == model.read(tmp_path)


def test_a_folder_without_the_file_reads_no_images(tmp_path: Path):
    assert media.load(tmp_path) is None


def test_other_models_and_models_without_a_processor_read_no_images(tmp_path: Path):
    assert media_config.read(LLAVA.write(tmp_path), {"model_type": "llama"}, TOKENIZER) is None
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "processor_config.json").unlink()
    assert media_config.read(tmp_path, LLAVA.config, TOKENIZER) is None
    assert media_config.add_to_folder(tmp_path, LLAVA.config, TOKENIZER, tmp_path) == []


def test_the_numbers_of_llava(tmp_path: Path):
    assert LLAVA.read(tmp_path) == Llava(
        resample=3,
        scale=1 / 255,
        mean=(0.48145466, 0.4578275, 0.40821073),
        std=(0.26862954, 0.26130258, 0.27577711),
        placeholder="<image>",
        row_token="<image>",
        row_id=id_of("<image>"),
        pads_to_square=False,
        shortest_edge=56,
        size=None,
        crop=(56, 56),
        num_rows=16,  # 4 × 4 patches; the class's row is dropped
    )


def test_the_class_s_row_counts_with_the_strategy_full(tmp_path: Path):
    config = {**LLAVA.config, "vision_feature_select_strategy": "full"}
    read = Model(config, LLAVA.image_processor, {}).read(tmp_path)
    assert isinstance(read, Llava)
    assert read.num_rows == 17


def test_a_processor_without_normalization_leaves_the_values(tmp_path: Path):
    image = {**LLAVA.image_processor, "do_normalize": False, "do_rescale": False}
    read = Model(LLAVA.config, image, {}).read(tmp_path)
    assert (read.scale, read.mean, read.std) == (1.0, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


def test_newer_folders_have_both_in_one_file(tmp_path: Path):
    folder = Model(IDEFICS3.config, {"image_processor_type": "another"}, {}).write(tmp_path)
    processor = {**IDEFICS3.processor, "image_processor": IDEFICS3.image_processor}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    read = media_config.read(folder, IDEFICS3.config, TOKENIZER)
    assert isinstance(read, Idefics3)
    assert (read.longest_edge, read.tile, read.tile_rows) == (256, 64, 16)


def without(model: Model, *keys: str, **others: Any) -> Model:
    """With an image processor that lacks keys, and has others."""
    image = {key: value for key, value in model.image_processor.items() if key not in keys}
    return Model(model.config, {**image, **others}, model.processor)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_a_processor_without_a_type_is_that_of_the_model(model: Model, tmp_path: Path):
    read = without(model, "image_processor_type").read(tmp_path)
    assert read == model.read(tmp_path)


def test_an_old_processor_is_named_as_a_feature_extractor(tmp_path: Path):
    old = without(LLAVA, "image_processor_type", "size", "crop_size", size=56, crop_size=56)
    old.image_processor["feature_extractor_type"] = "CLIPFeatureExtractor"
    assert old.read(tmp_path) == LLAVA.read(tmp_path)


@pytest.mark.parametrize("size", [56, {"shortest_edge": 56}, [56, 56]])
def test_llava_onevision_s_tiles_are_square_in_all_forms_of_their_size(size: Any, tmp_path: Path):
    assert without(ONEVISION, "size", size=size).read(tmp_path) == ONEVISION.read(tmp_path)


@pytest.mark.parametrize(
    ("model", "vision", "num_rows"),
    [
        (LLAVA, {"model_type": "siglip_vision_model"}, 196),  # 224 pixels, 16 a patch
        (LLAVA, {"model_type": "clip_vision_model"}, 50),  # 224 pixels, 32 a patch
        (LLAVA, {"patch_size": 14}, 257),  # CLIP is LLaVA's default
    ],
)
def test_a_vision_config_without_defaults_of_its_class(
    model: Model, vision: dict[str, Any], num_rows: int, tmp_path: Path
):
    """Older versions of transformers write only what differs from the tower's class."""
    kind = "Siglip" if vision.get("model_type") == "siglip_vision_model" else "CLIP"
    config = {**model.config, "vision_config": vision, "vision_feature_select_strategy": "full"}
    read = Model(config, {"image_processor_type": f"{kind}ImageProcessor"}, {}).read(tmp_path)
    assert isinstance(read, Llava)
    assert read.num_rows == num_rows


@pytest.mark.parametrize(
    ("model", "size", "patch"), [(IDEFICS3, None, 32), (GEMMA3, 224, 16), (PIXTRAL, 1024, 16), (ONEVISION, 224, 16)]
)
def test_a_vision_config_that_is_the_default_of_its_class(model: Model, size: int | None, patch: int, tmp_path: Path):
    vision = {"model_type": model.config["vision_config"].get("model_type", "idefics3")}
    image = {**model.image_processor}
    if model in (GEMMA3, ONEVISION):
        image |= {"size": {"height": size, "width": size}, "image_grid_pinpoints": [[size, size]]}
    lean = Model({**model.config, "mm_tokens_per_image": 49, "vision_config": vision}, image, {})
    full = Model(
        {**lean.config, "vision_config": {**vision, "image_size": size or 224, "patch_size": patch}}, image, {}
    )
    assert lean.read(tmp_path) == full.read(tmp_path)


def test_qwen_s_limits_may_have_the_old_names(tmp_path: Path):
    read = QWEN2_VL.read(tmp_path)
    assert isinstance(read, Qwen2VL)
    assert (read.min_pixels, read.max_pixels) == (3136, 100000)


def test_qwen_s_images_have_a_limit_of_their_own(tmp_path: Path):
    for given, used in ((2**40, MAX_PATCHES * 14**2), (MAX_PATCHES * 14**2 + 1, MAX_PATCHES * 14**2), (9999, 9999)):
        read = Model(QWEN2_VL.config, {**QWEN2_VL.image_processor, "max_pixels": given}, {}).read(tmp_path)
        assert isinstance(read, Qwen2VL) and read.max_pixels == used
        assert read.max_patches >= used // 14**2


def test_pixtral_s_own_class_is_llava(tmp_path: Path):
    model = Model({**PIXTRAL.config, "model_type": "llava"}, PIXTRAL.image_processor, {})
    read = model.read(tmp_path)
    assert isinstance(read, Pixtral)
    assert read.merge == 1


def test_pan_and_scan_has_transformers_defaults(tmp_path: Path):
    read = Model(GEMMA3.config, {**GEMMA3.image_processor, "do_pan_and_scan": True}, {}).read(tmp_path)
    assert isinstance(read, Gemma3)
    assert read.pan_and_scan == PanAndScan(256, 4, 1.2)


IMAGE, OWN, TOWER = "preprocessor_config.json", "processor_config.json", "config.json"


@pytest.mark.parametrize(
    ("name", "file", "change", "error"),
    [
        ("llava", IMAGE, {"image_processor_type": "Foo"}, "image_processor_type is 'Foo'; supported are LlavaImage"),
        ("llava", IMAGE, {"resample": 9}, "resample is 9; it must be the number of a filter, 0 to 5"),
        ("llava", IMAGE, {"resample": "no"}, "resample is 'no'; it must be of type int"),
        ("llava", IMAGE, {"size": {"width": 3}}, "size is {'width': 3}; it must be an object with height and width or"),
        ("llava", IMAGE, {"size": {"shortest_edge": 0}}, "of 1 to 16384"),
        ("llava", IMAGE, {"size": {"shortest_edge": 10**9}}, "of 1 to 16384"),
        ("llava", IMAGE, {"crop_size": 28}, "size and crop_size make images 28×28; the vision tower reads 56×56"),
        ("llava", IMAGE, {"do_center_crop": False}, "make images of any shape; the vision tower reads 56×56"),
        ("llava", IMAGE, {"do_resize": False}, "do_resize is False; images of any size are not supported"),
        ("llava", IMAGE, {"image_std": [1, 1, 0]}, "no value of image_std 0"),
        ("llava", IMAGE, {"image_mean": [1, 1]}, "image_mean is [1, 1]; it must be three numbers"),
        ("llava", IMAGE, {"rescale_factor": -1}, "rescale_factor must be above 0"),
        ("llava", OWN, {"patch_size": 16}, "patch_size is 16; the tower's is 14"),
        ("llava", TOWER, {"vision_config": 3}, "vision_config is 3; it must be the object that describes the tower"),
        ("llava", TOWER, {"image_token_index": 10**6}, "image_token_id is 1000000; the tokenizer has no such id"),
        ("llava", TOWER, {"image_token_index": "a"}, "image_token_index is 'a'; it must be of type int"),
        ("llava", TOWER, {"vision_feature_select_strategy": "cls"}, "'cls'; it must be default or full"),
        ("idefics3", OWN, {"image_seq_len": 17}, "image_seq_len is 17; a tile has 16"),
        ("idefics3", OWN, {"fake_image_token": "<none>"}, "'<none>' stands for images; the tokenizer must have it as"),
        ("idefics3", IMAGE, {"size": {"height": 3, "width": 3}}, "it must be an object with longest_edge"),
        ("llava_onevision", OWN, {"num_image_tokens": 5}, "num_image_tokens is 5; a tile has 16"),
        ("llava_onevision", IMAGE, {"image_grid_pinpoints": [[57, 56]]}, "a list of [height, width], multiples of 56"),
        ("llava_onevision", TOWER, {"vision_aspect_ratio": "pad"}, "it must be anyres_max_ and a number of tiles"),
        ("llava_onevision", TOWER, {"vision_feature_select_strategy": "default"}, "must keep the rows of all patches"),
        ("gemma3", TOWER, {"mm_tokens_per_image": 15}, "mm_tokens_per_image is 15; it must divide 8×8 into squares"),
        ("gemma3", OWN, {"image_seq_length": 256}, "image_seq_length is 256; mm_tokens_per_image of config.json is 16"),
        ("qwen2_vl", IMAGE, {"min_pixels": 200000}, "min_pixels is 200000; it must be at most max_pixels, 100000"),
        ("qwen2_vl", IMAGE, {"merge_size": 3}, "merge_size is 3; spatial_merge_size of vision_config"),
        ("qwen2_vl", IMAGE, {"size": 56}, "size is 56; it must be an object with shortest_edge and longest_edge"),
        ("qwen2_vl", IMAGE, {"size": {"height": 56, "width": 56}}, "must be an object with shortest_edge and longest"),
        ("pixtral", OWN, {"spatial_merge_size": 4}, "spatial_merge_size is 4; the model's is 2"),
    ],
)
def test_errors_name_file_and_key(name: str, file: str, change: dict[str, Any], error: str, tmp_path: Path):
    config, image, processor = MODELS[name]
    changed = {TOWER: {**config}, IMAGE: {**image}, OWN: {**processor}}
    changed[file].update(change)
    model = Model(changed[TOWER], changed[IMAGE], changed[OWN])
    folder = model.write(tmp_path / "model")
    with pytest.raises(ModelError) as caught:
        media_config.read(folder, model.config, TOKENIZER)
    assert str(caught.value).startswith(f"{folder / file}: ")
    assert error in str(caught.value)
    (note,) = media_config.add_to_folder(folder, model.config, TOKENIZER, tmp_path)
    assert note.startswith(f"images are not read: {folder / file}: ")
    assert not (tmp_path / media.MEDIA).exists()


def test_an_edited_media_json_is_refused(tmp_path: Path):
    media.save(LLAVA.read(tmp_path), tmp_path)
    path = tmp_path / media.MEDIA
    path.write_text(path.read_text().replace('"resample": 3', '"resample": 7'))
    with pytest.raises(msgspec.ValidationError, match="resample"):
        media.load(tmp_path)
