"""Muse Glimmer: norms without weights, two epsilons, a gate of attention, as in transformers. It has no class for texts
alone, so the checkpoint is that of the whole model, with a tiny vision tower."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MuseGlimmerConfig, MuseGlimmerForConditionalGeneration

from pipeline.config.settings import Settings
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.model_folder import NOTES
from pipeline.stages.execute.cpu.native.program import NativeProgram
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.stage import prepare
from tests.stages.execute.driver import Driver, row_add, settings
from tests.stages.prepare import checkpoints

MAX_ERROR, MAX_NATIVE_ERROR = 1e-4, 0.05
"""The second relative to the standard deviation of the logits, in bfloat16."""
VOCAB_SIZE, LENGTH = 608, 97
TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "sliding_window": 21,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "post_norm_eps": 0.05,
    "final_logit_softcapping": 12.0,
    "output_multiplier": 0.5,
}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def make(**changes: Any) -> Any:
    ids = {"image_token_id": 600, "video_token_id": 601, "out_hidden_size": 128, "projector_hidden_size": 32}
    config = MuseGlimmerConfig(text_config={**TEXT, **changes}, vision_config=VISION, **ids)
    torch.manual_seed(0)
    model = MuseGlimmerForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "norm" not in name:
                parameter.normal_(0, 0.15)
            else:
                parameter.add_(torch.randn_like(parameter) * (0.1 if "norm" in name else 0.5))
    return model.eval()


def write(folder: Path, model: Any, **edits: Any) -> Path:
    source = checkpoints.save_folder(folder / "source", model)
    if edits:
        config = model.config.to_dict()
        checkpoints.edit_config(source, text_config={**config["text_config"], **edits})
    return prepare(Settings(model=str(source), cache_dir=str(folder / "cache")))


def random_ids(num: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 600, num).tolist()


def theirs_of(model: Any, ids: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float().numpy()


def test_whole_prompts_and_chunks_have_the_logits_of_transformers(tmp_path: Path) -> None:
    model = make()
    folder = write(tmp_path, model)
    driver = Driver(folder, settings(kernels="torch", kv_mib=2))
    ids, others = random_ids(LENGTH, 1), random_ids(LENGTH, 2)
    first, second = theirs_of(model, ids), theirs_of(model, others)
    assert min(first.std(), second.std()) > 100 * MAX_ERROR
    blocks = [driver.take_blocks(LENGTH) for _ in range(2)]
    driver.step([(0, 0, LENGTH, True)], adds=[row_add(0, ids, blocks[0])])
    np.testing.assert_allclose(driver.logits()[0], first[-1], rtol=0, atol=MAX_ERROR)
    driver.step(drops=[0])
    for at in range(0, LENGTH, 33):
        num = min(33, LENGTH - at)
        driver.step([(1, at, num, True)], adds=[row_add(1, others[: at + num], blocks[1])])
        np.testing.assert_allclose(driver.logits()[0], second[at + num - 1], rtol=0, atol=MAX_ERROR)
        driver.step(drops=[1])
    assert "images are not served" in (folder / NOTES).read_text()


def test_the_native_program_is_near_them(tmp_path: Path) -> None:
    model, ids = make(), random_ids(60, 3)
    driver = Driver(write(tmp_path, model), settings(dtype="bfloat16", kv_mib=2))
    assert isinstance(driver.runner.program, NativeProgram)
    driver.step([(0, 0, 60, True)], adds=[row_add(0, ids, driver.take_blocks(60))])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(parameter.bfloat16())
    theirs = theirs_of(model, ids)[-1]
    assert np.sqrt(np.mean((driver.logits()[0] - theirs) ** 2)) < MAX_NATIVE_ERROR * theirs.std()


def test_layers_without_a_rotary_embedding_may_be_named(tmp_path: Path) -> None:
    thetas = [0, 10000.0, 10000.0, 0, 10000.0]
    model, ids = make(layer_rope_theta=thetas), random_ids(40, 4)
    folder = write(tmp_path, model)
    assert ModelConfig.load(folder).layers_without_rope == [0, 3]
    driver = Driver(folder, settings(kernels="torch", kv_mib=2))
    driver.step([(0, 0, 40, True)], adds=[row_add(0, ids, driver.take_blocks(40))])
    np.testing.assert_allclose(driver.logits()[0], theirs_of(model, ids)[-1], rtol=0, atol=MAX_ERROR)


@pytest.mark.parametrize(
    ("edits", "words"),
    [
        (
            {"layer_rope_theta": [0, 5.0, 5.0, 5.0, 0]},
            "layer_rope_theta must have num_hidden_layers = 5 values, each 0",
        ),
        ({"layer_rope_theta": [0]}, "layer_rope_theta must have num_hidden_layers = 5 values"),
        ({"post_norm_eps": 0}, "post_norm_eps is 0; it must be a number above 0"),
        ({"attention_bias": True}, "attention_bias is True: attention with biases is not supported"),
    ],
    ids=str,
)
def test_what_is_refused(tmp_path: Path, edits: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        write(tmp_path, make(), **edits)
