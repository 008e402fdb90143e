"""`pipeline check-model` passes exactly the models whose results match transformers."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoConfig

from pipeline.__main__ import main
from pipeline.cli.check.cases import CheckPlan, ComputedCase, ProgramResults, ReferenceResults
from pipeline.cli.check.judge import judge
from pipeline.runtime.model.model_config import Llama3Rope, ModelConfig
from pipeline.stages.execute.cpu.native.attention import NativeAttention
from pipeline.stages.prepare.check_model import gguf_reference, random_checkpoint
from pipeline.stages.prepare.check_model.reference import Reference
from pipeline.stages.prepare.gguf import model as gguf_model
from pipeline.stages.prepare.gguf import ropes
from pipeline.stages.prepare.sources.source import ModelError
from tests.stages.execute.checkpoints import config_of
from tests.stages.prepare import checkpoints, forms
from tests.stages.prepare.gguf import architectures

pytestmark = pytest.mark.usefixtures("check_model_state")

ROOT = Path(__file__).parents[3]

CONFIGS: dict[str, dict[str, Any]] = {
    "Gemma 3": {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": 1152,
        "head_dim": 256,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "intermediate_size": 6912,
        "vocab_size": 262144,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000,
        "rope_local_base_freq": 10000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "Phi-4-mini": {
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "hidden_size": 3072,
        "num_hidden_layers": 32,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 200064,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75,
        "rope_scaling": {"type": "longrope", "long_factor": [1.0 + i for i in range(48)], "short_factor": 48 * [1.0]},
        "sliding_window": 262144,
        "tie_word_embeddings": True,
        "pad_token_id": None,
    },
    "SmolLM2": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
    },
    "Llama 3.2": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "head_dim": 64,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "eos_token_id": [128001, 128008, 128009],
    },
    "Mistral": {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "hidden_size": 5120,
        "head_dim": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "num_hidden_layers": 40,
        "torch_dtype": "bfloat16",
    },
    "Qwen2.5": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "sliding_window": 32768,
        "max_window_layers": 21,
        "rope_theta": 1e6,
        "use_sliding_window": True,
        "tie_word_embeddings": True,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
    "Qwen3": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "head_dim": 128,
        "rope_theta": 1000000,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 28,
        "attention_bias": False,
    },
}


def config_file(folder: Path, config: dict[str, Any]) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def check(model: str, *more: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["check-model", model, "--tokens", "80", "--set", "execute.num_threads=1", *more])
    out, err = capsys.readouterr()
    return code, out, err


def results(out: str) -> list[tuple[str, str]]:
    """Program and result of each row of the table. A cell that is too long for its column continues in further lines,
    whose last cell is empty."""
    rows: list[tuple[str, str]] = []
    for line in out.splitlines():
        if line.startswith("│"):
            program, *_, result = [cell.strip() for cell in line.split("│")[1:-1]]
            if result:
                rows.append((program, result))
            else:
                rows[-1] = (f"{rows[-1][0]} {program}".rstrip(), rows[-1][1])
    return rows


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_is_enough_to_check_an_architecture(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = check(config_file(tmp_path, CONFIGS[name]), capsys=capsys)
    assert code == 0, out + err
    found = results(out)
    assert len(found) == 10 and {result for _, result in found} == {"pass"}
    programs = {program for program, _ in found}
    assert len(programs) == 2 and "torch, float32" in programs and any("bfloat16" in name for name in programs)
    assert "passed: 10 checks" in out and "warning" not in err


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    model = checkpoints.tiny("qwen3", head_dim=32, use_sliding_window=True, sliding_window=20, max_window_layers=1)
    return checkpoints.save_folder(tmp_path / "tiny", model)


def test_a_checkpoint_passes_until_a_part_of_it_is_broken(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--set", f"cache_dir={tmp_path / 'cache'}", "--kernels", "torch"]
    code, out, err = check(str(checkpoint), *where, capsys=capsys)
    assert (code, len(results(out))) == (0, 5), out + err
    assert "qwen3, 3 layers, hidden size 64, 4 heads on 2 of size 32, vocabulary of 608, window 20 in 2 of them" in out
    # The model prepared from it now rotates by other angles.
    (path,) = (tmp_path / "cache").glob("model-*/model.json")
    text = path.read_text()
    assert text.count("5000.0") == 1
    path.write_text(text.replace("5000.0", "9000.0"))
    code, out, _ = check(str(checkpoint), *where, capsys=capsys)
    assert code == 1
    assert {result for _, result in results(out)} == {"FAIL"}
    assert "failed: 5 of 5 checks" in out


def test_an_ignored_window_fails(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ModelConfig, "window_of", lambda self, layer: self.sliding_window and self.sliding_window + 1)
    where = ["--set", f"cache_dir={tmp_path / 'cache'}", "--kernels", "torch"]
    code, out, _ = check(str(checkpoint), *where, capsys=capsys)
    assert code == 1 and "failed: 5 of 5" in out


def test_one_broken_program_fails_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NativeAttention, "_head_norms", lambda self, norms: None)
    code, out, _ = check(config_file(tmp_path, CONFIGS["Qwen3"]), capsys=capsys)
    assert code == 1
    found = results(out)
    assert {result for program, result in found if program.startswith("torch")} == {"pass"}
    assert {result for program, result in found if not program.startswith("torch")} == {"FAIL"}


def test_a_window_longer_than_every_prompt_is_reported_as_unchecked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoints.save_folder(tmp_path / "wide", checkpoints.tiny("mistral", sliding_window=128))
    where = ["--set", f"cache_dir={tmp_path / 'cache'}", "--kernels", "torch"]
    code, _, err = check(str(folder), *where, capsys=capsys)
    assert code == 0
    assert (
        "the sliding window of 128 is longer than every prompt, so that it was not checked: --tokens 192 would" in err
    )
    code, _, err = check(str(folder), *where, "--tokens", "192", capsys=capsys)
    assert (code, err) == (0, "")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "mamba"}, "cannot make a tiny model of model_type 'mamba'"),
        ({"model_type": "persimmon"}, "model_type is 'persimmon', which is not supported; `pipeline"),
        ({"model_type": "klingon"}, "transformers does not take this config"),
        ({"model_type": "klingon", "rope_theta": None}, "its null keys are 'rope_theta'"),
        ({**CONFIGS["SmolLM2"], "hidden_size": "wide"}, "config.json: hidden_size is 'wide'; it must be of type int"),
        ({**CONFIGS["SmolLM2"], "rope_theta": None}, "config.json: rope_theta is None; it must be a number"),
        ({**CONFIGS["SmolLM2"], "rms_norm_eps": None}, "'rms_norm_eps'"),
        ({**CONFIGS["Qwen3"], "head_dim": None}, "its null keys are 'head_dim'"),
        ({**CONFIGS["Phi-4-mini"], "rope_scaling": [1]}, "rope_scaling is [1]; it must be of type dict"),
        ({"model_type": 7}, "model_type is 7; it must name an architecture"),
        ({}, "model_type is None; it must name an architecture"),
    ],
)
def test_an_unsupported_model_is_an_error_of_one_line(
    tmp_path: Path, config: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = check(config_file(tmp_path, config), capsys=capsys)
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].startswith("pipeline check-model: error: ") and words in err


@pytest.mark.parametrize("key", ["rope_theta", "head_dim"])
def test_a_folder_that_transformers_cannot_load_is_an_error_that_names_the_key(
    tmp_path: Path, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoints.save_folder(tmp_path / "tiny", checkpoints.tiny("qwen3", num_hidden_layers=1, head_dim=16))
    config = json.loads((folder / "config.json").read_text())
    theta = config.pop("rope_parameters")["rope_theta"]
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": theta, key: None}))
    where = ["--set", f"cache_dir={tmp_path / 'cache'}", "--kernels", "torch"]
    code, out, err = check(str(folder), *where, capsys=capsys)
    assert (code, out) == (1, ""), err
    line = err.splitlines()[-1]
    assert line.startswith("pipeline check-model: error: ") and key in line and "Traceback" not in err


def test_it_says_which_rules_applied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = forms.write(
        tmp_path / "tiny",
        "mistral3",
        lambda folder: folder.save({**folder.tensors, "lm_head.weight": forms.random_head()}),
    )
    where = ["--set", f"cache_dir={tmp_path / 'cache'}", "--kernels", "torch"]
    code, out, err = check(str(folder), *where, capsys=capsys)
    assert code == 0, out + err
    assert "the LM head is lm_head.weight, which differs from" in out and "images are not served" in out


def test_there_is_no_comparison_with_weights_that_transformers_makes_up(tmp_path: Path) -> None:
    folder = forms.write(tmp_path / "tiny", "llama", lambda folder: folder.rename(lambda name: f"x.{name}"))
    with pytest.raises(ModelError, match=r"finds no weights for 'lm_head\.weight' and makes up \d+ tensors"):
        Reference(folder)


@pytest.mark.parametrize(
    ("model", "more", "words"),
    [
        ("/no/such/folder", [], "no such folder or file"),
        ("/no/such/config.json", [], "config.json cannot be read: No such file or directory"),
    ],
)
def test_an_invalid_checkpoint_is_an_error(
    model: str, more: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = check(model, *more, capsys=capsys)
    assert code == 1 and words in err


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


CHECKED = ["mixtral", "gpt-oss", "phi3, longrope"]
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


def test_a_quantized_checkpoint_is_an_error_that_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {**CONFIGS["SmolLM2"], "quantization_config": {"quant_method": "gptq", "bits": 4}}
    config_file(tmp_path, config)
    code, _, err = check(str(tmp_path), capsys=capsys)
    assert code == 1 and "has quantized weights: check-model compares float weights with transformers" in err


def test_prompts_of_impossible_lengths_are_rejected(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for tokens in ("3", "-1", "99999999"):
        assert main(["check-model", str(checkpoint), "--tokens", tokens]) == 2
        assert f"--tokens {tokens}: needs a number from 64" in capsys.readouterr().err
    where = ["--set", f"cache_dir={checkpoint.parent / 'cache'}"]
    code, _, err = check(str(checkpoint), *where, "--tokens", "250", capsys=capsys)
    assert code == 1 and "exceed the model's context of 256 tokens" in err


def test_a_missing_gpu_is_an_error_of_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr("pipeline.supervisor.gpu.DRIVER", "libthere-is-none.so.1")
    code, out, err = check("/no/such/folder", "--set", "execute.device=cuda", capsys=capsys)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith(
        "pipeline check-model: error: execute.device is 'cuda', but this machine has no NVIDIA driver"
    )


def test_it_runs_as_a_command(tmp_path: Path) -> None:
    model = config_file(tmp_path, CONFIGS["SmolLM2"])
    options = ("--tokens", "64", "--kernels", "torch", "--set", "execute.num_threads=1")
    result = subprocess.run(
        [sys.executable, "-m", "pipeline", "check-model", model, *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert "passed: 5 checks" in result.stdout
    assert not list(tmp_path.glob("check-model-*"))


# --- shrunk models keep their kind


def shrunk(config: dict[str, Any]) -> Any:
    full = AutoConfig.for_model(**config)
    return AutoConfig.for_model(**{**config, **random_checkpoint.shrink(full)})


def test_a_shrunk_model_keeps_its_ratios_and_kinds() -> None:
    smol = shrunk(CONFIGS["SmolLM2"])
    assert smol.num_attention_heads / smol.num_key_value_heads == 3
    assert smol.hidden_size == smol.num_attention_heads * smol.head_dim
    mistral = shrunk(CONFIGS["Mistral"])
    assert mistral.hidden_size != mistral.num_attention_heads * mistral.head_dim
    assert mistral.sliding_window == 24
    qwen = shrunk(CONFIGS["Qwen2.5"])
    assert qwen.layer_types == ["full_attention"] * 3 + ["sliding_attention"]
    llama = shrunk(CONFIGS["Llama 3.2"])
    assert llama.rope_parameters["rope_type"] == "llama3" and llama.rope_parameters["factor"] == 32.0
    assert llama.rope_parameters["original_max_position_embeddings"] == 64
    kinds = ["full_attention"] * 11 + ["sliding_attention"]
    assert random_checkpoint._fewer(kinds, 4) == ["full_attention"] * 3 + ["sliding_attention"]


# --- tolerances


PLAN = CheckPlan([[1, 2, 3]])


def sides(change: float = 0.0, text: int = 7, exact: bool = True) -> tuple[ProgramResults, ReferenceResults]:
    """One prompt with a text of one id; transformers has two nearly equal ones: 7 and 8."""
    logits = np.random.default_rng(0).standard_normal(100).astype(np.float32)
    logits[7], logits[8] = 5.0, 4.9999
    ours = logits.copy()
    ours[3] += change
    rounded = logits + np.float32(0.02) * np.random.default_rng(1).standard_normal(100).astype(np.float32)
    return (
        ProgramResults("any", exact, [ComputedCase("whole", (1, 2, 3), ours)], {"whole": [[text]]}),
        ReferenceResults({(1, 2, 3): logits}, [[7]], {} if exact else {(1, 2, 3): rounded}),
    )


def test_a_difference_is_allowed_up_to_its_bound() -> None:
    for change, passes in ((0.0, True), (5e-5, True), (1e-3, False), (float("nan"), False), (float("inf"), False)):
        (finding,) = judge(PLAN, *sides(change))
        assert finding.passed == passes


def test_a_rounded_program_may_lose_as_much_as_transformers_in_bfloat16() -> None:
    (finding,) = judge(PLAN, *sides(0.1, exact=False))
    assert finding.passed and 0.005 < finding.worst == finding.difference < finding.allowed == finding.allowed_worst
    assert 0.01 < finding.allowed < 0.02
    for change in (0.4, 5.0, float("nan")):
        (finding,) = judge(PLAN, *sides(change, exact=False))
        assert not finding.passed


def test_one_bad_row_among_many_fails() -> None:
    ours, theirs = sides(exact=False)
    for first in range(10, 200):
        ours.made.append(ComputedCase("whole", (first,), theirs.logits[1, 2, 3]))
        theirs.logits[first,], theirs.bfloat16[first,] = theirs.logits[1, 2, 3], theirs.bfloat16[1, 2, 3]
    assert judge(PLAN, ours, theirs)[0].passed
    ours.made[-1] = ComputedCase("whole", (199,), theirs.logits[1, 2, 3] + 0.05 * np.float32(np.arange(100) % 7))
    (finding,) = judge(PLAN, ours, theirs)
    assert finding.difference < finding.allowed and finding.worst > finding.allowed_worst and not finding.passed


def test_some_rows_may_have_other_experts_in_a_mixture() -> None:
    """But most must not differ more than in transformers, and none as much as unrelated logits or NaNs."""
    ours, theirs = sides(exact=False)
    ours.chooses_experts = True
    for first in range(10, 20):
        ours.made.append(ComputedCase("whole", (first,), theirs.logits[1, 2, 3]))
        theirs.logits[first,], theirs.bfloat16[first,] = theirs.logits[1, 2, 3], theirs.bfloat16[1, 2, 3]
    changed = theirs.logits[1, 2, 3] + 0.1 * np.float32(np.arange(100) % 7)
    ours.made[-1] = ComputedCase("whole", (19,), changed)
    assert judge(PLAN, ours, theirs)[0].passed
    for row in (theirs.logits[1, 2, 3][::-1] * 2, np.full(100, np.nan, np.float32)):
        ours.made[-1] = ComputedCase("whole", (19,), row)
        assert not judge(PLAN, ours, theirs)[0].passed
    for i in range(6):
        ours.made[-1 - i] = ComputedCase("whole", (19 - i,), changed)
    assert not judge(PLAN, ours, theirs)[0].passed


def test_a_text_may_differ_only_where_transformers_is_undecided() -> None:
    (finding,) = judge(PLAN, *sides(text=8))
    assert finding.passed and (finding.num_same, finding.num_undecided) == (0, 1)
    (finding,) = judge(PLAN, *sides(text=9))
    assert not finding.passed and (finding.num_same, finding.num_undecided) == (0, 0)


def test_a_text_that_diverges_without_reference_logits_fails() -> None:
    ours, theirs = sides(text=8)
    theirs = ReferenceResults({(1, 2): theirs.logits[1, 2, 3]}, theirs.texts)
    ours.made = [ComputedCase("whole", (1, 2), theirs.logits[1, 2])]
    (finding,) = judge(PLAN, ours, theirs)
    assert not finding.passed
