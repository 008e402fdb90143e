"""Problems with a GPU, or with a model on it, are reported before weights are read."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pipeline.config.settings import ExecuteSettings, Settings
from pipeline.errors import UserError
from pipeline.runtime.model.model_config import Layout, Piece
from pipeline.runtime.model.model_folder import format_key
from pipeline.runtime.model.pooler import Pooler
from pipeline.stages.execute.cuda.available import Facts, look, require, weight_bytes, why_not
from tests.stages.execute import checkpoints

GIB = 1024**3
H100 = Facts("2.11.0+cu130", True, True, "", "NVIDIA H100 80GB HBM3", (9, 0), 80 * GIB, 79 * GIB)
WEIGHTS = 16 * GIB


def problem_of(facts: Facts = H100, num_bytes: int = WEIGHTS, head_dim: int = 128, **settings: Any) -> str:
    config = checkpoints.config_of(name="big", head_dim=head_dim)
    execute = ExecuteSettings(device="cuda", **settings.pop("execute", {}))
    problem = why_not(Settings(execute=execute, **settings), config, facts, num_bytes)
    assert problem is not None and "\n" not in problem
    return problem


def test_a_model_that_fits_has_no_problem() -> None:
    settings = Settings(execute=ExecuteSettings(device="cuda"))
    for head_dim in (8, 64, 80, 96, 128, 256):
        assert why_not(settings, checkpoints.config_of(head_dim=head_dim), H100, WEIGHTS) is None
    ampere = replace(H100, capability=(8, 0))
    assert why_not(settings, checkpoints.config_of(head_dim=64), ampere, WEIGHTS) is None


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (replace(H100, is_built_for_cuda=False, torch_version="2.13.0+cpu"), "(2.13.0+cpu) supports only CPUs"),
        (replace(H100, trouble="No CUDA GPUs are available"), "no GPU is usable (No CUDA GPUs are available)"),
        (
            replace(H100, name="Tesla T4", capability=(7, 5)),
            "Tesla T4 is too old: it has compute capability 7.5, but 8",
        ),
        (replace(H100, has_triton=False), "triton is not installed"),
    ],
)
def test_an_unusable_machine_is_reported_with_the_reason(facts: Facts, words: str) -> None:
    problem = problem_of(facts)
    assert problem.startswith("execute.device is 'cuda', but ") and words in problem


@pytest.mark.parametrize("head_dim", [4, 100, 264, 512])
def test_an_unsupported_head_dim_is_named(head_dim: int) -> None:
    assert f"big has head_dim {head_dim}" in problem_of(head_dim=head_dim)


def test_a_model_that_does_not_fit_is_reported_with_alternatives() -> None:
    assert problem_of(num_bytes=80 * GIB).endswith(
        "the weights of big take 80.0 GiB, but NVIDIA H100 80GB HBM3 has only 80.0 GiB: use a smaller model, or set "
        "quantization to 'int8' or 'int4'"
    )
    assert "or set quantization to 'int4'" in problem_of(num_bytes=80 * GIB, quantization="int8")
    assert "quantization" not in problem_of(num_bytes=80 * GIB, quantization="int4")
    busy = replace(H100, free_bytes=10 * GIB)
    assert "of the 80.0 GiB of NVIDIA H100 80GB HBM3 only 10.0 GiB are free" in problem_of(busy)
    assert "more than execute.gpu_memory_utilization = 0.2" in problem_of(execute={"gpu_memory_utilization": 0.2})
    settings = Settings(execute=ExecuteSettings(device="cuda", gpu_memory_utilization=0.2, kv_cache_bytes=GIB))
    assert why_not(settings, checkpoints.config_of(head_dim=64), H100, WEIGHTS) is None, "the share has no effect"


def of_files(folder: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str], **changes: Any) -> int:
    save_file(tensors, folder / "model.safetensors", metadata)
    config = checkpoints.config_of(weight_files=["model.safetensors"], **changes.pop("config", {}))
    return weight_bytes(Settings(execute=ExecuteSettings(**changes.pop("execute", {})), **changes), config, folder)


ENCODER = {"causal": False, "residual_norms": True, "pre_norms": False, "pooler": Pooler(pooling="mean", width=64)}


@pytest.mark.parametrize(
    ("fields", "lacking"),
    [
        (ENCODER, "norms of the residual after each sum, no LM head"),
        ({"pooler": Pooler(pooling="last", width=64)}, "no LM head"),
    ],
)
def test_models_that_generate_no_text_are_refused_by_what_they_need(fields: dict[str, Any], lacking: str) -> None:
    config = checkpoints.config_of(name="tiny", head_dim=64, **fields)
    problem = why_not(Settings(execute=ExecuteSettings(device="cuda")), config, H100, WEIGHTS)
    assert problem == (
        "execute.device is 'cuda', but the GPU back end lacks what tiny (llama) needs: "
        f"{lacking}. Set execute.device to 'cpu'"
    )


def test_weights_are_counted_in_their_loaded_format(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(64, 256, dtype=torch.float16), "norm": torch.zeros(256)}
    assert of_files(tmp_path, tensors, {}) == 64 * 256 * 2 + 1024
    assert of_files(tmp_path, tensors, {}, execute={"dtype": "float32"}) == 64 * 256 * 4 + 1024
    assert of_files(tmp_path, tensors, {}, quantization="int8") == 64 * (256 + 2 * 2) + 1024
    assert of_files(tmp_path, tensors, {}, quantization="int4") == 64 * (128 + 2 * 4) + 1024


def test_quantized_weights_count_their_file_size_and_a_tied_head_nothing(tmp_path: Path) -> None:
    codes = {"a": torch.zeros(64, 272, dtype=torch.uint8), "lm_head.weight": torch.zeros(64, 64, dtype=torch.bfloat16)}
    formats = {format_key("a"): "q8_0"}
    assert of_files(tmp_path, codes, formats, config={"tie_embeddings": True}) == 64 * 272
    assert of_files(tmp_path, codes, formats, config={"tie_embeddings": False}) == 64 * 272 + 64 * 64 * 2
    only_head = {"tie_embeddings": True, "layout": Layout(pieces={"model.embed_tokens": Piece("lm_head")})}
    assert of_files(tmp_path, codes, formats, config=only_head) == 64 * 272 + 64 * 64 * 2


def test_k_quants_count_their_size_on_the_gpu(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(64, 2 * 144, dtype=torch.uint8), "b": torch.zeros(64, 210, dtype=torch.uint8)}
    formats = {format_key("a"): "q4_k", format_key("b"): "q6_k"}
    assert of_files(tmp_path, tensors, formats) == 64 * (2 * 148 + 210)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there-is-none"):
        weight_bytes(Settings(), checkpoints.config_of(weight_files=["there-is-none.safetensors"]), tmp_path)


def test_detection_reports_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = look()
    assert facts.has_triton
    assert facts.is_built_for_cuda == (torch.version.cuda is not None)
    if facts.is_built_for_cuda and not facts.trouble:
        assert 0 < facts.free_bytes <= facts.total_bytes and facts.capability > (0, 0)
    else:
        monkeypatch.setenv("TRITON_INTERPRET", "0")
        config = checkpoints.config_of(weight_files=[])
        with pytest.raises(UserError, match=r"execute\.device is 'cuda', but"):
            require(Settings(execute=ExecuteSettings(device="cuda")), config, Path())


def test_each_rank_needs_a_gpu_of_its_own() -> None:
    words = problem_of(replace(H100, num_gpus=1), execute={"tensor_parallel": 2})
    assert words.startswith("execute.tensor_parallel is 2, and each rank needs a GPU of its own, but 1 are visible")
    settings = Settings(execute=ExecuteSettings(device="cuda", tensor_parallel=2))
    assert why_not(settings, checkpoints.config_of(head_dim=64), replace(H100, num_gpus=2), WEIGHTS) is None
