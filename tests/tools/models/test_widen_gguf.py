"""tools/models/widen_gguf.py: a wider model computes the same."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from pipeline.config.settings import Settings
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.prepare.stage import prepare
from tests.stages.execute.driver import Driver, settings
from tests.stages.prepare import checkpoints
from tools.models.widen_gguf import widen

PROMPTS = [[5, 9, 200, 31, 7], [8, 100, 3]]


def folder_of(file: Path) -> Path:
    return prepare(Settings(model=str(file), cache_dir=str(file.with_suffix(".cache"))))


def test_a_wider_model_computes_the_same(tmp_path: Path) -> None:
    shape = {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 256}
    model = checkpoints.tiny_llama(**shape, num_hidden_layers=2, tie_word_embeddings=True)
    narrow = checkpoints.save_gguf(tmp_path / "narrow.gguf", model, kind=Kind.F32)
    widen(narrow, tmp_path / "wide.gguf")
    folders = [folder_of(narrow), folder_of(tmp_path / "wide.gguf")]
    config = ModelConfig.load(folders[1])
    assert (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim) == (256, 8, 2, 32)
    logits = []
    for folder in folders:
        driver = Driver(folder, settings(max_num_seqs=2))
        driver.generate(PROMPTS, 1)
        logits.append(driver.logits().copy())
    assert logits[0].std() > 0.1
    # The scaled weights of norms are rounded.
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-4)


def test_other_weights_than_float32_are_refused(tmp_path: Path) -> None:
    file = checkpoints.save_gguf(tmp_path / "tiny.gguf", checkpoints.tiny_llama(hidden_size=64), kind=Kind.Q8_0)
    kinds = {tensor.tensor_type for tensor in gguf.GGUFReader(file).tensors}
    assert Kind.Q8_0 in kinds
    with pytest.raises(SystemExit, match="convert it with llama-quantize"):
        widen(file, tmp_path / "wide.gguf")
