"""`pipeline check-model` on models that make embeddings, scores or labels."""

from pathlib import Path
from typing import Any

import pytest

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


def test_a_gguf_file_of_an_embedder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = written(tmp_path, ENCODERS["bert"])
    code, _, err = check(str(path), "--set", f"cache_dir={tmp_path / 'cache'}", capsys=capsys)
    assert code == 1 and "check-model compares .gguf files of models that generate text only" in err
