"""What prepare makes of folders with vision towers: vision.json, notes, and errors that name file and key."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.model_folder import NOTES, notes_of
from pipeline.runtime.model.vision_config import VisionConfig
from pipeline.stages.execute.weights import Weights
from pipeline.stages.prepare.sources.config_json import ConfigReader
from pipeline.stages.prepare.sources.source import ModelError
from tests.stages.execute.driver import settings
from tests.stages.execute.vision.tiny_towers import QWEN, VARIANTS, encode, encoder, images, make, prepared, save
from tests.stages.prepare import checkpoints

TORCH = settings(kernels="torch")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    variant = VARIANTS["idefics3"]
    return save(tmp_path, variant, make(variant))


def rename(source: Path, new: Any) -> None:
    """Rename the tensors of a folder; None removes one."""
    path = source / "model.safetensors"
    tensors = {new(name): tensor for name, tensor in load_file(path).items()}
    tensors.pop(None, None)
    save_file(tensors, path)


def rows_of(folder: Path) -> np.ndarray:
    tower = encoder(folder, TORCH)
    (rows,) = encode(tower, images(1, 48, 48))
    tower.close()
    return rows


def test_a_tower_is_read_beside_its_text_model(tmp_path: Path, source: Path) -> None:
    folder = prepared(tmp_path, source)
    vision, text = VisionConfig.load(folder), ModelConfig.load(folder)
    assert vision is not None and not (folder / NOTES).exists()
    assert (vision.hidden_size, vision.side, vision.patch_width) == (text.hidden_size, 6, 192)
    assert (vision.num_rows(48, 48), vision.num_rows(32, 16)) == (9, 2)
    stored = load_file(source / "model.safetensors")
    tower = [tensor for name, tensor in stored.items() if "vision_model" in name or "connector" in name]
    assert vision.num_weights == sum(tensor.numel() for tensor in tower if tensor.dim() > 1)


def test_names_may_lack_the_prefix(tmp_path: Path, source: Path) -> None:
    expected = rows_of(prepared(tmp_path / "a", source))
    rename(source, lambda name: name.removeprefix("model."))
    assert np.array_equal(rows_of(prepared(tmp_path / "b", source)), expected)


def test_quantization_of_the_text_model_leaves_the_tower(tmp_path: Path, source: Path) -> None:
    expected = rows_of(prepared(tmp_path / "a", source))
    folder = prepared(tmp_path / "b", source, quantization="q8_0")
    assert np.array_equal(rows_of(folder), expected)
    assert ModelConfig.load(folder).weight_files == ["model.safetensors"]


def test_the_account_of_a_text_model_has_no_tower(tmp_path: Path, source: Path) -> None:
    folder = prepared(tmp_path, source)
    config = ModelConfig.load(folder)
    sizes = Weights(folder, config, "bf16").layer_bytes(config.num_layers)
    stored = load_file(source / "model.safetensors")
    layers = sum(4 * tensor.numel() for name, tensor in stored.items() if "text_model.layers" in name)
    assert sum(sizes) == layers


def test_without_a_preprocessor_only_text_is_served(tmp_path: Path, source: Path) -> None:
    (source / "preprocessor_config.json").unlink()
    folder = prepared(tmp_path, source)
    assert VisionConfig.load(folder) is None
    assert any(note.endswith("images are not served") for note in notes_of(folder))


def test_without_the_tensors_only_text_is_served(tmp_path: Path, source: Path) -> None:
    rename(source, lambda name: None if "connector" in name else name)
    folder = prepared(tmp_path, source)
    assert VisionConfig.load(folder) is None
    assert any("have no floats 'model.connector.modality_projection.proj.weight'" in note for note in notes_of(folder))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("hidden_size", "48", r"config\.json: vision_config\.hidden_size is '48'; it must be of type int"),
        ("image_size", 4, r"vision_config\.image_size is 4; it must be at least patch_size = 8"),
        (
            "num_attention_heads",
            5,
            r"vision_config\.hidden_size is 48; it must be a multiple of num_attention_heads = 5",
        ),
        ("hidden_act", "mish", r"vision_config\.hidden_act is 'mish'; it must be one of 'silu'"),
        ("num_channels", 1, r"vision_config\.num_channels is 1; it must be 3"),
        ("layer_norm_eps", -1.0, r"vision_config\.layer_norm_eps is -1\.0; it must be a positive number"),
        ("intermediate_size", 81, r"has shape .*80.*, vision_config of config\.json says"),
    ],
)
def test_a_wrong_value_of_the_tower_is_named(tmp_path: Path, source: Path, key: str, value: Any, words: str) -> None:
    config = json.loads((source / "config.json").read_text())
    checkpoints.edit_config(source, vision_config={**config["vision_config"], key: value})
    with pytest.raises(ModelError, match=words):
        prepared(tmp_path, source)


def test_a_wrong_value_outside_of_the_tower_is_named(tmp_path: Path, source: Path) -> None:
    checkpoints.edit_config(source, scale_factor=4)
    with pytest.raises(ModelError, match=r"config\.json: scale_factor is 4; it must be a divisor of the 6 patches"):
        prepared(tmp_path, source)


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"vision_feature_layer": [1, 2]}, "images are not served: vision_feature_layer is [1, 2]; one layer is"),
        ({"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy is 'full' for a tower of clip"),
    ],
)
def test_what_is_valid_but_not_supported_is_noted(tmp_path: Path, changes: dict[str, Any], note: str) -> None:
    variant = VARIANTS["llava"]
    source = save(tmp_path, variant, make(variant))
    checkpoints.edit_config(source, **changes)
    folder = prepared(tmp_path, source)
    assert VisionConfig.load(folder) is None
    assert any(note in line for line in notes_of(folder)), notes_of(folder)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_heads", 5, r"vision_config\.hidden_size is 48; it must be a multiple of num_attention_heads = 5"),
        ("depth", "3", r"vision_config\.depth is '3'; it must be of type int"),
        ("window_size", 15, r"vision_config\.window_size is 15; it must be at least 16"),
        ("num_position_embeddings", 24, r"vision_config\.num_position_embeddings is 24; it must be a square"),
        ("deepstack_visual_indexes", [3], r"deepstack_visual_indexes is \[3\]; it must be a list of some of the 3 la"),
        ("deepstack_visual_indexes", [1, 0], r"is \[1, 0\]; .* in rising order"),
        ("fullatt_block_indexes", [True], r"vision_config\.fullatt_block_indexes is \[True\]; it must be a list of la"),
    ],
)
def test_a_wrong_value_of_a_tower_for_patches_is_named(tmp_path: Path, key: str, value: Any, words: str) -> None:
    variant = QWEN["qwen3_vl" if key in ("num_position_embeddings", "deepstack_visual_indexes") else "qwen2_5_vl"]
    source = save(tmp_path, variant, make(variant))
    config = json.loads((source / "config.json").read_text())
    checkpoints.edit_config(source, vision_config={**config["vision_config"], key: value})
    with pytest.raises(ModelError, match=words):
        prepared(tmp_path, source)


@pytest.mark.parametrize("section", [[2, 3, 4], [2, 6], "2 3 3", [2.0, 3, 3]])
def test_sections_of_coordinates_must_fit_a_head(tmp_path: Path, section: Any) -> None:
    variant = QWEN["qwen2_vl"]
    source = save(tmp_path, variant, make(variant))
    text = json.loads((source / "config.json").read_text())["text_config"]
    rope = {**text["rope_parameters"], "mrope_section": section}
    checkpoints.edit_config(source, text_config={**text, "rope_parameters": rope})
    with pytest.raises(ModelError, match="it must be three integers whose sum is 8"):
        prepared(tmp_path, source)


def test_a_layer_that_the_tower_lacks_is_named(tmp_path: Path) -> None:
    variant = VARIANTS["llava"]
    source = save(tmp_path, variant, make(variant))
    checkpoints.edit_config(source, vision_feature_layer=-4)
    with pytest.raises(ModelError, match=r"config\.json: vision_feature_layer is -4; it must be one of the 3 layers"):
        prepared(tmp_path, source)


def test_towers_of_older_files_have_a_part_of_the_name_more(tmp_path: Path) -> None:
    """As those of LLaVA on the hub."""
    variant = VARIANTS["llava"]
    source = save(tmp_path, variant, make(variant))
    expected = rows_of(prepared(tmp_path / "a", source))
    rename(source, lambda name: name.replace("vision_tower.", "vision_tower.vision_model."))
    assert np.array_equal(rows_of(prepared(tmp_path / "b", source)), expected)


def test_a_text_model_of_llava_may_lack_sizes(tmp_path: Path) -> None:
    """As llava-1.5-7b on the hub, whose text_config has only what differs from Llama's defaults."""
    text = {"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
    reader = ConfigReader(tmp_path / "config.json", {"model_type": "llava", "text_config": text})
    model = reader.model("llava", [], {})
    assert (model.architecture, model.num_layers, model.hidden_size, model.vocab_size) == ("llama", 32, 4096, 32064)
    assert (model.num_kv_heads, model.intermediate_size, model.max_position) == (32, 11008, 4096)
