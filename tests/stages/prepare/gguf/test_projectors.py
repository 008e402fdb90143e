"""Models for texts and images as two .gguf files: rows of embeddings are transformers', and wrong files are named."""

from contextlib import closing
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch

from pipeline.config.settings import Settings
from pipeline.media import config as media
from pipeline.runtime.model.model_folder import NOTES
from pipeline.runtime.model.vision_config import VisionConfig
from pipeline.stages.prepare.sources.gguf_files import projector_beside
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.stage import prepare
from tests.stages.execute.driver import settings
from tests.stages.execute.vision.tiny_towers import (
    TEXT,
    VARIANTS,
    Variant,
    encode,
    encoder,
    images,
    make,
    normalized,
    save,
)
from tests.stages.execute.vision.tiny_towers import prepared as prepared_folder
from tests.stages.prepare import checkpoints
from tests.stages.prepare.gguf.projector_files import language_model, save_language_model, save_projector, token_id

MAX_ERROR = 1e-4
KINDS = [name for name in VARIANTS if name not in ("gemma3", "smolvlm, padded heads")]
"""smolvlm's has the other gelu, which these files don't tell apart."""


def prepared(path: Path) -> Path:
    return prepare(Settings(model=str(path), cache_dir=str(path.parent / "cache")))


@pytest.mark.parametrize("name", KINDS)
def test_a_tower_makes_the_rows_of_transformers(tmp_path: Path, name: str) -> None:
    variant = VARIANTS[name]
    model = make(variant)
    folder = prepared(save_language_model(tmp_path / "tiny.Q8_0.gguf", model))
    assert media.load(folder) is None and VisionConfig.load(folder) is None
    save_projector(tmp_path / "mmproj-tiny-f32.gguf", model)
    folder = prepared(tmp_path / "tiny.Q8_0.gguf")
    assert not (folder / NOTES).is_file(), (folder / NOTES).read_text()
    with closing(encoder(folder, settings(kernels="torch", dtype="float32"))) as computed:
        for size in variant.sizes:
            pixels = images(2, *size)
            (ours,) = encode(computed, pixels)
            with torch.inference_mode():
                rows = variant.theirs(model, normalized(pixels))
            assert np.abs(ours - rows.reshape(-1, rows.shape[-1]).numpy()).max() < MAX_ERROR
    (tmp_path / "of_hf").mkdir()
    theirs = media.load(prepared_folder(tmp_path / "of_hf", save(tmp_path / "of_hf", variant, model)))
    ours_ = media.load(folder)
    assert ours_ is not None and theirs is not None
    token = "[IMG]" if "Pixtral" in type(theirs).__name__ else "<image>"
    assert ours_.row_id == token_id(folder, token)
    changed: dict[str, Any] = {"row_id": ours_.row_id, "placeholder": token, "row_token": token}
    match theirs:  # what the folder of the tiny model says otherwise
        case media.Idefics3():
            changed |= {"longest_edge": 96, "tile": 48, "tile_rows": 9}
        case media.Llava(crop=tuple()):
            changed |= {"shortest_edge": 48, "size": None}
        case media.Pixtral():
            changed["max_size"] = (48, 48)
    assert msgspec.structs.replace(theirs, **changed) == ours_


IDEFICS3 = VARIANTS["idefics3"]


@pytest.fixture(scope="module")
def model() -> Any:
    return make(IDEFICS3)


def test_numbers_of_other_formats_are_read(tmp_path: Path, model: Any) -> None:
    rows = {}
    for kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16):
        (own := tmp_path / kind.name).mkdir()
        save_projector(own / "mmproj-model.gguf", model, kind)
        folder = prepared(save_language_model(own / "tiny.gguf", model))
        with closing(encoder(folder, settings(kernels="torch", dtype="float32"))) as computed:
            (rows[kind.name],) = encode(computed, images(1, 48, 48))
    assert 0 < np.abs(rows["F16"] - rows["F32"]).max() < 0.02 * np.abs(rows["F32"]).max()
    assert 0 < np.abs(rows["BF16"] - rows["F32"]).max() < 0.1 * np.abs(rows["F32"]).max()


def test_matrices_that_the_first_converter_swapped_are_found(tmp_path: Path, model: Any) -> None:
    rows = []
    swapped: dict[str, str] = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
    for name, renamed in (("a", {}), ("b", swapped)):
        (own := tmp_path / name).mkdir()
        save_projector(own / "mmproj-model-f16.gguf", model, renamed=renamed)
        folder = prepared(save_language_model(own / "tiny.gguf", model))
        with closing(encoder(folder, settings(kernels="torch", dtype="float32"))) as computed:
            rows += encode(computed, images(1, 48, 48))
    assert np.array_equal(rows[0], rows[1])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"changes": {"clip.vision.block_count": 2}}, "tensor v.blk.2"),
        ({"changes": {"clip.vision.embedding_length": 42}}, r"tensor v.* has shape .*48.*, but the metadata says .*42"),
        ({"changes": {"clip.vision.attention.head_count": 5}}, "hidden_size is 48; it must be a multiple of"),
        ({"changes": {"clip.vision.projector.scale_factor": 4}}, "scale_factor is 4; it must be a divisor of the 6"),
        ({"changes": {"clip.vision.image_size": None}}, "the key clip.vision.image_size is missing"),
        ({"changes": {"clip.vision.image_mean": None}}, "the key clip.vision.image_mean is missing"),
        ({"changes": {"clip.vision.image_size": "48"}}, "clip.vision.image_size is '48', not of type"),
        ({"without": "v.blk.1.ffn_up.bias"}, "the tensor v.blk.1.ffn_up.bias is missing"),
        ({"without": "mm.model.fc.weight"}, "the tensor mm.model.fc.weight is missing"),
        ({"architecture": "llama"}, "general.architecture is 'llama'; that of a projector is clip"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, model: Any, changes: dict[str, Any], words: str) -> None:
    path = save_projector(tmp_path / "mmproj.gguf", model, **changes)
    with pytest.raises(ModelError, match=words) as error:
        prepared(save_language_model(tmp_path / "tiny.gguf", model))
    assert str(path) in str(error.value)


def test_the_projector_of_another_language_model_is_refused(tmp_path: Path, model: Any) -> None:
    text = {**TEXT, "hidden_size": 32}
    other = make(Variant("idefics3", IDEFICS3.vision, {"scale_factor": 2, "text_config": text}))
    save_projector(tmp_path / "mmproj.gguf", other)
    words = "makes 32 numbers for the language model, whose hidden size is 64: it is the projector of another model"
    with pytest.raises(ModelError, match=words):
        prepared(save_language_model(tmp_path / "tiny.gguf", model))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"clip.projector_type": "resampler"},
            "clip.projector_type is 'resampler'; supported are idefics3, mlp, pixtral",
        ),
        ({"clip.has_vision_encoder": False}, "it has no vision tower"),
    ],
)
def test_what_is_not_supported_leaves_a_model_for_texts(
    tmp_path: Path, model: Any, changes: dict[str, Any], words: str
) -> None:
    save_projector(tmp_path / "mmproj.gguf", model, changes=changes)
    folder = prepared(save_language_model(tmp_path / "tiny.gguf", model))
    assert f"images are not served: mmproj.gguf: {words}" in (folder / NOTES).read_text()
    assert VisionConfig.load(folder) is None and media.load(folder) is None


def test_a_vocabulary_without_a_token_for_images_is_said(tmp_path: Path, model: Any) -> None:
    save_projector(tmp_path / "mmproj.gguf", model)
    folder = prepared(checkpoints.save_gguf(tmp_path / "tiny.gguf", language_model(model)))
    assert "the vocabulary of the language model has no token <image>" in (folder / NOTES).read_text()


def test_a_projector_is_no_model(tmp_path: Path, model: Any) -> None:
    path = save_projector(tmp_path / "mmproj.gguf", model)
    with pytest.raises(ModelError, match="is a projector of images: name the file of its language model"):
        prepared(path)


def test_a_folder_with_a_model_and_its_projector_is_a_model(tmp_path: Path, model: Any) -> None:
    (folder := tmp_path / "both").mkdir()
    save_language_model(folder / "tiny.gguf", model)
    save_projector(folder / "mmproj.gguf", model)
    assert VisionConfig.load(prepare(Settings(model=str(folder), cache_dir=str(tmp_path / "cache")))) is not None


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a-Q4_K_M.gguf", "a-Q8_0.gguf", "mmproj-F32.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf"], "mmproj-F16.gguf"),
        (["a-Q4_K_M.gguf", "mmproj-a-Q8_0.gguf", "mmproj-a-bf16.gguf"], "mmproj-a-bf16.gguf"),
        (["a-Q4_K_M.gguf", "b.gguf", "mmproj-F16.gguf", "mmproj-b-f16.gguf"], None),
        (["a-Q4_K_M.gguf", "b.gguf", "a.mmproj-f16.gguf"], "a.mmproj-f16.gguf"),
        (["a-Q4_K_M.gguf", "imatrix.gguf", "mmproj.gguf"], "mmproj.gguf"),
        (["a-Q4_K_M.gguf"], None),
    ],
)
def test_the_projector_of_a_file_is_found_by_its_name(tmp_path: Path, names: list[str], expected: str | None) -> None:
    for name in names:
        (tmp_path / name).touch()
    found = projector_beside(tmp_path / names[0])
    assert (found and found.name) == expected
