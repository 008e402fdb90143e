"""Gemma 4: layers of different sizes, shared keys and values and inputs of each layer, as in transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from pipeline.config.settings import ExecuteSettings, LoraSettings, Settings
from pipeline.errors import UserError
from pipeline.kernels.cpu.isa import available
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.model_folder import NOTES
from pipeline.stages.execute.models.limits import require_supported
from pipeline.stages.execute.weights import Weights
from pipeline.stages.prepare.stage import prepare
from tests.stages.execute import recurrent_models, tiny_architectures
from tests.stages.execute.driver import Driver, row_add, settings
from tests.stages.execute.recurrent_models import logits_of
from tests.stages.execute.tiny_architectures import GEMMA4, VARIANTS, VOCAB_SIZE
from tests.stages.prepare import checkpoints

MAX_ERROR = 1e-4
MAX_NATIVE_ERROR, MAX_WIDE_ERROR = 0.05, 0.02
"""Of the CPU library, relative to the standard deviation of the logits, and where its activations are float32."""
NAMES = ["gemma4", "gemma4, dense", "gemma4, experts"]


def random_ids(num: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, num).tolist()


def theirs_of(name: str, folder: Path, model: Any, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Their logits in float64."""
    changes = {**GEMMA4, **VARIANTS[name].changes}
    variant = recurrent_models.Variant("gemma4_text", "Gemma4ForCausalLM", changes)
    return logits_of(variant, folder, model, prompts)


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_those_in_float64(tmp_path: Path, name: str) -> None:
    """Whole prompts, chunks of 33, and a batch of decoding rows."""
    folder, model = tiny_architectures.write(tmp_path, VARIANTS[name])
    driver = Driver(folder, settings(kernels="torch", kv_mib=2))
    prompts = [random_ids(100, 1), random_ids(100, 2)]
    blocks = [driver.take_blocks(100) for _ in prompts]
    found: dict[tuple[int, int], np.ndarray] = {}

    def step(*entries: tuple[int, int, int]) -> None:
        adds = [row_add(row, prompts[row][: at + num], blocks[row]) for row, at, num in entries]
        driver.step([(*entry, True) for entry in entries], adds=adds)
        found.update({(row, at + num): one for (row, at, num), one in zip(entries, driver.logits(), strict=True)})
        driver.step(drops=[row for row, *_ in entries])

    step((0, 0, 97))
    for at in (0, 33, 66):
        step((1, at, min(33, 97 - at)))
    for at in range(97, 100):
        step((0, at, 1), (1, at, 1))
    theirs = theirs_of(name, tmp_path, model, prompts)
    assert min(float(logits.std()) for logits in theirs) > 100 * MAX_ERROR
    for (row, end), logits in found.items():
        np.testing.assert_allclose(logits, theirs[row][end - 1], rtol=0, atol=MAX_ERROR, err_msg=str((row, end)))


@pytest.mark.parametrize("isa", available())
def test_each_instruction_set_is_near_them(tmp_path: Path, isa: str) -> None:
    """With the same rounded weights. Heads of 256 and 512."""
    name = "gemma4, heads of 512"
    folder, model = tiny_architectures.write(tmp_path, VARIANTS[name])
    driver, ids = Driver(folder, settings(dtype="bfloat16", kernels=isa, kv_mib=4)), random_ids(60, 3)
    driver.step([(0, 0, 60, True)], adds=[row_add(0, ids, driver.take_blocks(60))])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(parameter.bfloat16())
    (theirs,) = theirs_of(name, tmp_path, model, [ids])
    error = np.sqrt(np.mean((driver.logits()[0] - theirs[-1].numpy()) ** 2)) / float(theirs[-1].std())
    assert error < (MAX_WIDE_ERROR if isa in ("avx2", "neon", "portable") else MAX_NATIVE_ERROR)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_in_8_bits_both_programs_are_near_the_others(tmp_path: Path, kernels: str) -> None:
    """Scores are not scaled, so rounding changes them by percents; other keys would make unrelated logits."""
    folder, _ = tiny_architectures.write(tmp_path, VARIANTS["gemma4"])
    ids, found = random_ids(60, 3), []
    for kv_dtype in ("auto", "int8"):
        driver = Driver(folder, settings(dtype="bfloat16", kernels=kernels, kv_dtype=kv_dtype, kv_mib=2))
        driver.step([(0, 0, 60, True)], adds=[row_add(0, ids, driver.take_blocks(60))])
        found.append(driver.logits()[0])
    assert np.sqrt(np.mean((found[1] - found[0]) ** 2)) < 0.2 * found[0].std()


def test_the_table_of_inputs_is_read_in_the_file(tmp_path: Path) -> None:
    """It is no part of what is loaded, and no copy of it is made."""
    folder, _ = tiny_architectures.write(tmp_path, VARIANTS["gemma4"])
    config = ModelConfig.load(folder)
    weights = Weights(folder, config, "bf16", keeps_floats=True)
    table = weights.in_file("model.per_layer_embeddings.weight", VOCAB_SIZE, 6 * 32)
    begin = np.frombuffer(weights.files[0]._map, np.uint8).ctypes.data
    assert begin <= table.data.ctypes.data < begin + weights.files[0].num_bytes
    table_bytes = table.data.nbytes
    plain = Weights(folder, config, "f32").in_file("model.per_layer_embeddings.weight", VOCAB_SIZE, 6 * 32)
    assert plain.format == table.format, "whatever the other matrices become"
    stored = weights.files[0].num_bytes
    assert weights.least_bytes(config) * 2 < stored - table_bytes, "float32 in this file, bfloat16 in memory"


def test_the_text_model_of_one_for_texts_images_and_sounds(tmp_path: Path) -> None:
    """Its file has unused keys and values of layers that read those of others."""
    model = tiny_architectures.make(VARIANTS["gemma4"])
    source = checkpoints.save_folder(tmp_path / "source", model)
    tensors = {
        f"model.language_model.{name.removeprefix('model.')}": tensor
        for name, tensor in load_file(source / "model.safetensors").items()
    }
    tensors |= {"model.vision_tower.patch.weight": torch.ones(8, 8), "model.embed_audio.norm.weight": torch.ones(8)}
    tensors["model.language_model.layers.4.self_attn.k_proj.weight"] = torch.ones(16, 64)
    tensors["model.language_model.layers.4.self_attn.k_norm.weight"] = torch.ones(16)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    text = json.loads((source / "config.json").read_text())
    text |= {"global_head_dim": 32, "per_layer_config": None}  # as in the first files
    whole = {"model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"], "text_config": text}
    (source / "config.json").write_text(json.dumps({**whole, "vision_config": {}, "audio_config": {}}))
    folder = prepare(Settings(model=str(source), cache_dir=str(tmp_path / "cache")))
    reported = (folder / NOTES).read_text()
    assert "and 1 more: images are not served" in reported
    assert "layers.4.self_attn.k_norm.weight' and 1 more: the layer reads the keys and values of another" in reported
    driver, ids = Driver(folder, settings(kernels="torch", kv_mib=2)), random_ids(40, 1)
    driver.step([(0, 0, 40, True)], adds=[row_add(0, ids, driver.take_blocks(40))])
    (theirs,) = theirs_of("gemma4", tmp_path, model, [ids])
    np.testing.assert_allclose(driver.logits()[0], theirs[-1], rtol=0, atol=MAX_ERROR)


def test_what_is_not_supported_is_refused_by_its_name(tmp_path: Path) -> None:
    config = ModelConfig.load(tiny_architectures.write(tmp_path, VARIANTS["gemma4"])[0])
    for made, key in (
        (Settings(execute=ExecuteSettings(tensor_parallel=2)), "execute.tensor_parallel is 2"),
        (Settings(execute=ExecuteSettings(pipeline_parallel=2)), "execute.pipeline_parallel is 2"),
        (Settings(lora=LoraSettings(runtime_loading=True)), "lora.runtime_loading is True"),
    ):
        with pytest.raises(UserError, match=f"{key}, which is not supported for .*: its layers have different sizes"):
            require_supported(made, config)
    require_supported(Settings(), config)


def test_the_text_model_of_the_unified_one(tmp_path: Path) -> None:
    """Of 12B: from a checkpoint of the whole model, as transformers saves it."""
    variant = VARIANTS["gemma4_unified"]
    text = {**variant.sizes, **variant.changes, "vocab_size": VOCAB_SIZE, "bos_token_id": 1, "eos_token_id": 2}
    vision, audio = {"mm_embed_dim": 64, "output_proj_dims": 64, "mm_posemb_size": 16}, {"audio_embed_dim": 64}
    tokens = {"image_token_id": 600, "video_token_id": 601, "audio_token_id": 602}
    config = AutoConfig.for_model(
        "gemma4_unified", text_config=text, vision_config=vision, audio_config=audio, **tokens
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    source = checkpoints.save_folder(tmp_path / "source", model)
    folder = prepare(Settings(model=str(source), cache_dir=str(tmp_path / "cache")))
    assert "images are not served" in (folder / NOTES).read_text()
    driver, ids = Driver(folder, settings(kernels="torch", kv_mib=2)), random_ids(40, 1)
    driver.step([(0, 0, 40, True)], adds=[row_add(0, ids, driver.take_blocks(40))])
    with torch.inference_mode():
        theirs = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float().numpy()
    np.testing.assert_allclose(driver.logits()[0], theirs, rtol=0, atol=MAX_ERROR)
