"""`pipeline check-model` on models that make embeddings, scores or labels."""

import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.pooler import HEAD_FILE
from tests.cli.check.checked import check, config_file, results
from tests.stages.prepare import checkpoints
from tests.stages.prepare.encoders.test_sentence_transformers import LAST, add_dense, add_modules
from tests.stages.prepare.gguf.test_gguf_encoders import ENCODERS, written

pytestmark = pytest.mark.usefixtures("check_model_state")

SIZES = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "max_position_embeddings": 514,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "MiniLM": {"model_type": "bert", "architectures": ["BertModel"], "vocab_size": 30522, "pad_token_id": 0, **SIZES},
    "a reranker": {
        "model_type": "xlm-roberta",
        "architectures": ["XLMRobertaForSequenceClassification"],
        "vocab_size": 250002,
        "pad_token_id": 1,
        "type_vocab_size": 1,
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        **SIZES,
    },
    "a tagger": {
        "model_type": "modernbert",
        "architectures": ["ModernBertForTokenClassification"],
        "vocab_size": 50368,
        "local_attention": 128,
        "global_attn_every_n_layers": 3,
        "pad_token_id": 50283,
        **SIZES,
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_is_enough_to_check_an_encoder(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = check(config_file(tmp_path, CONFIGS[name]), capsys=capsys)
    assert code == 0, out + err
    assert {result for _, result in results(out)} == {"pass"}
    assert "passed: 4 checks" in out and "several in a step" in out and "warning" not in err


def test_an_embedder_passes_until_its_head_is_broken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = checkpoints.save_folder(tmp_path / "tiny", checkpoints.tiny("qwen3", head_dim=16))
    add_modules(source, "Pooling", "Dense", "Normalize", Pooling=LAST)
    add_dense(source, "2_Dense", 64, 24, 1, activation_function="torch.nn.modules.activation.Tanh")
    where = ["--set", f"cache_dir={tmp_path / 'cache'}", "--kernels", "torch"]
    code, out, err = check(str(source), *where, capsys=capsys)
    assert (code, len(results(out))) == (0, 3), out + err
    assert "in chunks of 33" in out
    # The server now takes another pooling, then other angles.
    (path,) = (tmp_path / "cache").glob("model-*/model.json")
    text = path.read_text()
    for right, wrong in (('"pooling": "last"', '"pooling": "mean"'), ("5000.0", "9000.0")):
        assert text.count(right) == 1
        path.write_text(text.replace(right, wrong))
        code, out, _ = check(str(source), *where, capsys=capsys)
        assert code == 1 and {result for _, result in results(out)} == {"FAIL"}


CHECKED = ["bert, cls", "reranker", "nomic-bert", "gemma-embedding", "qwen3"]
CHECKED = [*ENCODERS] if os.environ.get("PIPELINE_ALL_CASES") else CHECKED


@pytest.mark.parametrize("name", CHECKED)
def test_a_gguf_file_of_an_embedder_or_reranker_is_compared(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    dense = np.random.default_rng(0).normal(0, 0.1, (48, 64)).astype("f4")
    more = {"dense_2_out": dense} if name == "gemma-embedding" else {}
    path, _ = written(tmp_path, ENCODERS[name], **more)
    where = ["--set", f"cache_dir={tmp_path / 'cache'}", "--kernels", "torch", "--tokens", "70"]
    code, out, err = check(str(path), *where, capsys=capsys)
    assert code == 0, out + err
    assert {result for _, result in results(out)} == {"pass"} and "with what transformers reads of the same file" in out


@pytest.mark.parametrize("wrong", ["pooling", "dense layer"])
def test_a_gguf_file_that_is_computed_otherwise_fails(
    tmp_path: Path, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    dense = np.random.default_rng(0).normal(0, 0.1, (48, 64)).astype("f4")
    path, _ = written(tmp_path, ENCODERS["gemma-embedding"], dense_2_out=dense)
    where = ["--set", f"cache_dir={tmp_path / 'cache'}", "--kernels", "torch", "--tokens", "70"]
    assert check(str(path), *where, capsys=capsys)[0] == 0
    (made,) = (tmp_path / "cache").glob("model-*")
    if wrong == "pooling":
        config = ModelConfig.load(made)
        assert config.pooler is not None
        pooler = msgspec.structs.replace(config.pooler, pooling="last")
        msgspec.structs.replace(config, pooler=pooler).save(made)
    else:
        tensors = load_file(made / HEAD_FILE)
        save_file({"0.weight": tensors["0.weight"].flip(0).contiguous()}, made / HEAD_FILE)
    code, out, err = check(str(path), *where, capsys=capsys)
    assert code == 1 and "FAIL" in {result for _, result in results(out)}, out + err
