"""`pipeline check-model` passes exactly the models whose results match transformers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.__main__ import main
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cpu.native.attention import NativeAttention
from pipeline.stages.prepare.check_model.reference import Reference
from pipeline.stages.prepare.sources.source import ModelError
from tests.cli.check.checked import CONFIGS, check, config_file, results
from tests.stages.prepare import checkpoints, forms

pytestmark = pytest.mark.usefixtures("check_model_state")

ROOT = Path(__file__).parents[3]


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
