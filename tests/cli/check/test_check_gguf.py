"""`pipeline check-model` on .gguf files, which are compared with what transformers reads of them."""

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch

from pipeline.runtime.model.rope import Llama3Rope
from pipeline.stages.prepare.check_model import gguf_reference
from pipeline.stages.prepare.gguf import model as gguf_model
from pipeline.stages.prepare.gguf import ropes
from pipeline.stages.prepare.sources.source import ModelError
from tests.cli.check.checked import check, results
from tests.stages.execute.checkpoints import config_of
from tests.stages.prepare import checkpoints
from tests.stages.prepare.gguf import architectures

pytestmark = pytest.mark.usefixtures("check_model_state")


def gguf_file(tmp_path: Path, **more: Any) -> Path:
    return checkpoints.save_gguf(
        tmp_path / "tiny.gguf", checkpoints.tiny_llama(), pre="llama-bpe", tokenizer=checkpoints.byte_level(), **more
    )


def test_a_gguf_file_is_compared_with_what_transformers_reads_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = gguf_file(tmp_path, kind=gguf.GGMLQuantizationType.Q8_0)
    where = ["--set", f"cache_dir={tmp_path / 'cache'}", "--kernels", "torch"]
    code, out, err = check(str(path), *where, capsys=capsys)
    assert (code, len(results(out))) == (0, 5), out + err
    assert "compared with what transformers reads of the same file, both with matrices in bfloat16" in out
    assert "de-quantizing" not in err
    (made,) = (tmp_path / "cache").glob("model-*/model.json")
    made.write_text(made.read_text().replace("5000.0", "9000.0"))
    code, out, err = check(str(path), *where, capsys=capsys)
    assert (code, out) == (1, "")
    assert "tiny.gguf: transformers reads the file otherwise: rope_theta 5000.0 (here 9000.0); check the" in err


def test_the_parts_of_a_gguf_file_are_compared_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gguf_file(tmp_path, tensors_per_file=5)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) > 2
    reader = gguf.GGUFReader
    for part in (parts[0], parts[-1]):
        where = ["--set", f"cache_dir={tmp_path / 'cache'}", "--kernels", "torch"]
        code, out, err = check(str(part), *where, capsys=capsys)
        assert (code, len(results(out))) == (0, 5), out + err
        assert "compared with what transformers reads of the same file" in out
    assert gguf.GGUFReader is reader


CHECKED = ["mixtral", "gpt-oss", "phi3, longrope", "gemma4, experts", "olmo3", "ernie4_5-moe"]
if os.environ.get("PIPELINE_ALL_CASES"):
    CHECKED = [*architectures.CASES]


@pytest.mark.parametrize("name", CHECKED)
def test_a_gguf_file_of_each_architecture_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path, _ = architectures.saved(tmp_path, name)
    where = ["--set", f"cache_dir={tmp_path / 'cache'}", "--kernels", "torch"]
    code, out, err = check(str(path), *where, capsys=capsys)
    assert (code, len(results(out))) == (0, 5), out + err


@pytest.mark.parametrize(
    ("name", "keys", "unused"),
    [
        ("gemma4", {}, ("blk.4.attn_k.weight", "blk.4.attn_v.weight", "blk.5.attn_k_norm.weight")),
        ("glm4moe", {"block_count": 4, "nextn_predict_layers": 1}, ("blk.3.nextn.eh_proj.weight",)),
    ],
)
def test_tensors_that_prepare_leaves_out_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, keys: dict[str, Any], unused: tuple[str, ...]
) -> None:
    """Keys and values in a layer that reads those of another, and layers that only predict further tokens."""
    case = architectures.CASES[name]
    case = dataclasses.replace(case, metadata={**case.metadata, **keys})
    others = {one: (np.ones((8, 16), np.float32), architectures.Kind.F32) for one in unused}
    path = architectures.save(tmp_path / "tiny.gguf", architectures.original(name, case), case, others)
    where = ["--set", f"cache_dir={tmp_path / 'cache'}", "--kernels", "torch"]
    code, out, err = check(str(path), *where, capsys=capsys)
    assert (code, len(results(out))) == (0, 5), out + err


def test_experts_that_transformers_reads_otherwise_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = architectures.saved(tmp_path, "qwen3moe")
    where = ["--set", f"cache_dir={tmp_path / 'cache'}", "--kernels", "torch"]
    code, out, err = check(str(path), *where, capsys=capsys)
    assert (code, len(results(out))) == (0, 5), out + err
    (made,) = (tmp_path / "cache").glob("model-*/model.json")
    made.write_text(re.sub(r'"num_per_token": ?3', '"num_per_token": 2', made.read_text()))
    code, out, err = check(str(path), *where, capsys=capsys)
    assert code == 1 and "transformers reads the file otherwise: experts" in err


def test_the_frequencies_of_llama_3_are_those_of_its_gguf_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rope = Llama3Rope(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
    divisors = ropes.llama3_divisors(config_of(head_dim=16, rope_theta=5000.0), rope).astype(np.float32)
    assert divisors.max() > 2
    path = gguf_file(tmp_path, extra_tensors={"rope_freqs.weight": divisors})
    where = ["--set", f"cache_dir={tmp_path / 'cache'}", "--kernels", "torch"]
    code, out, err = check(str(path), *where, "--tokens", "240", capsys=capsys)
    assert (code, len(results(out))) == (0, 5), out + err
    (made,) = (tmp_path / "cache").glob("model-*/model.json")
    made.write_text(re.sub(r'"factor": ?[0-9.]+', '"factor": 2.0', made.read_text()))
    code, out, err = check(str(path), *where, "--tokens", "240", capsys=capsys)
    assert code == 1 and "failed: 5 of 5" in out


def test_a_tensor_of_a_gguf_file_that_is_computed_wrongly_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_model, "_row_order", lambda name, tensor, config: None)  # q and k stay as in the file
    where = ["--set", f"cache_dir={tmp_path / 'cache'}", "--kernels", "torch"]
    mixtral, _ = architectures.saved(tmp_path, "mixtral")  # whose keys transformers does not read
    for path in (gguf_file(tmp_path), mixtral):
        code, out, _ = check(str(path), *where, capsys=capsys)
        assert code == 1 and "failed: 5 of 5" in out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "nothing in transformers' llama is named 'blk.0.attn_q.bias'"),
        ({"qkv_bias": True}, r"no tensor is 'model.layers.0.self_attn.k_proj.bias' of transformers' llama"),
        ({"hidden_size": 32}, r"'model.embed_tokens.weight' has the shape \(608, 64\); transformers has \(608, 32\)"),
    ],
)
def test_tensors_that_transformers_has_not_or_otherwise_are_an_error_of_one_line(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    path = gguf_file(tmp_path, extra_tensors={"blk.0.attn_q.bias": np.ones(64, np.float32)})
    model = checkpoints.tiny_llama().config
    ours = config_of(
        num_layers=2,
        hidden_size=64,
        intermediate_size=model.intermediate_size,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=608,
        tie_embeddings=model.tie_word_embeddings,
    )
    with pytest.raises(ModelError, match=words) as caught:
        gguf_reference.load(path, torch.float32, msgspec.structs.replace(ours, **changes))
    assert "\n" not in str(caught.value)
