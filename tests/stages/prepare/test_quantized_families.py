"""`quantization` keeps bits where it promises them, whatever a family calls its tensors, and the result loads."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from pipeline.config.settings import Settings
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cpu.native.program import NativeProgram
from pipeline.stages.prepare.stage import prepare
from tests.stages.execute import tiny_architectures
from tests.stages.execute.checkpoints import reference_logits
from tests.stages.execute.driver import Driver, row_add, settings
from tests.stages.execute.pair import NUM_THREADS
from tests.stages.execute.tiny_architectures import VARIANTS
from tests.stages.prepare import checkpoints
from tests.stages.prepare.checkpoints import formats_of
from tests.stages.prepare.quantized.test_convert import compare_logits, values_of

TABLES = {
    "gpt_neox": {"gpt_neox.embed_in.weight": "q8_0", "embed_out.weight": "q8_0"},
    "opt": {"model.decoder.embed_tokens.weight": "q8_0", "model.decoder.embed_positions.weight": "bf16"},
    "gpt2": {"transformer.wte.weight": "q8_0", "transformer.wpe.weight": "bf16"},
    "falcon 40b": {"transformer.word_embeddings.weight": "q8_0"},
    "mpt": {"transformer.wte.weight": "q8_0"},
    "falcon 3": {"model.embed_tokens.weight": "q8_0", "lm_head.weight": "q8_0"},
}
"""Formats of the embedding, the head and the positions."""
MAX_NATIVE_ERROR = 0.05
"""Relative to the standard deviation of the logits."""


def quantized(source: Path, quantization: Any) -> Path:
    return prepare(Settings(model=str(source), cache_dir=str(source.parent / "cache"), quantization=quantization))


@pytest.mark.parametrize("quantization", ["q8_0", "q4_1"])
@pytest.mark.parametrize("name", TABLES)
def test_tables_keep_their_bits_and_the_model_loads(tmp_path: Path, name: str, quantization: str) -> None:
    model = tiny_architectures.make(VARIANTS[name])
    folder = quantized(checkpoints.save_folder(tmp_path / "tiny", model), quantization)
    formats, values = formats_of(folder), values_of(folder)
    assert {tensor: formats[tensor] for tensor in TABLES[name]} == TABLES[name]
    # The library computes with blocks of rows, and GPT-2's matrices are transposed.
    expected = "bf16" if name == "gpt2" else quantization
    matrices = {tensor for tensor, value in values.items() if value.dim() > 1}
    assert {formats[tensor] for tensor in matrices - TABLES[name].keys()} == {expected}
    assert len(matrices) > len(TABLES[name])

    values = {tensor.replace("embed_out", "lm_head"): value for tensor, value in values.items()}
    missing, unknown = model.load_state_dict(values, strict=False)
    assert not unknown and set(missing) <= {"lm_head.weight"}
    compare_logits(folder, model)
    ids = np.random.default_rng(1).integers(3, 600, 40).tolist()
    driver = Driver(folder, settings(dtype="bfloat16", kv_mib=2, threads=NUM_THREADS))
    assert isinstance(driver.runner.program, NativeProgram)
    driver.step([(0, 0, 40, True)], adds=[row_add(0, ids, driver.take_blocks(40))])
    reference = reference_logits(model, ids)[-1].numpy()
    assert np.sqrt(np.mean((driver.logits()[0] - reference) ** 2)) < MAX_NATIVE_ERROR * reference.std()


def test_tables_of_a_text_part_keep_their_bits(tmp_path: Path) -> None:
    text = {**tiny_architectures.GEMMA, "vocab_size": 608, "sliding_window": 21}
    vision = {**dict.fromkeys(("hidden_size", "intermediate_size"), 32), "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4))
    folder = quantized(checkpoints.save_folder(tmp_path / "tiny", model), "q4_1")
    stored, _ = ModelConfig.load(folder).layout.find("model.embed_tokens.weight")
    formats = formats_of(folder)
    assert stored.startswith("language_model.") and formats[stored] == "q8_0"
    assert {format for name, format in formats.items() if name != stored} == {"q4_1", "f32"}
