"""Mixtures of experts: the forms in which checkpoints have the tensors of experts, and configs that are refused."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.config.settings import Settings
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.prepare.sources.config_json import ConfigReader
from pipeline.stages.prepare.stage import ModelError, prepare
from tests.stages.execute import tiny_architectures
from tests.stages.execute.checkpoints import reference_logits
from tests.stages.execute.driver import Driver, row_add, settings
from tests.stages.execute.tiny_architectures import VARIANTS
from tests.stages.prepare import checkpoints
from tests.stages.prepare.checkpoints import formats_of

IDS = np.random.default_rng(1).integers(3, 600, 40).tolist()
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def logits_of(folder: Path) -> np.ndarray:
    driver = Driver(folder, settings(kernels="torch", kv_mib=2))
    driver.step([(0, 0, 40, True)], adds=[row_add(0, IDS, driver.take_blocks(40))])
    return driver.logits()[0]


def prepared(source: Path, **changes: Any) -> Path:
    return prepare(Settings(model=str(source), cache_dir=str(source.parent / "cache"), **changes))


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe, some layers", "qwen3_moe", "olmoe"])
def test_experts_in_one_tensor_are_those_of_single_tensors(tmp_path: Path, name: str) -> None:
    """As transformers has them in memory since version 5."""
    model = tiny_architectures.make(VARIANTS[name])
    source = checkpoints.save_folder(tmp_path / "source", model)
    each = prepared(source)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in tensors)
    fused = checkpoints.save_folder(tmp_path / "fused" / "source", model)
    save_file(tensors, fused / "model.safetensors", {"format": "pt"})
    np.testing.assert_array_equal(logits_of(prepared(fused)), logits_of(each))


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_the_experts_of_a_checkpoint_are_quantized(tmp_path: Path, name: str) -> None:
    """With their router as it is. gpt-oss' matrices have rows of inputs, which have no blocks."""
    model = tiny_architectures.make(VARIANTS[name])
    folder = prepared(checkpoints.save_folder(tmp_path / "source", model), quantization="q8_0")
    formats = formats_of(folder)
    routers = {formats[name] for name in formats if "gate.weight" in name or "router" in name}
    experts = {formats[name] for name in formats if ".experts." in name and "bias" not in name}
    assert routers == {"f32"} and experts == {"q8_0" if name == "mixtral" else "bf16"}
    reference = reference_logits(model, IDS)[-1].numpy()
    assert np.sqrt(np.mean((logits_of(folder) - reference) ** 2)) < 0.1 * reference.std()


def test_gpt_oss_in_mxfp4_keeps_the_values_of_its_experts(tmp_path: Path) -> None:
    variant = tiny_architectures.Variant(
        "gpt_oss", {**VARIANTS["gpt_oss"].changes, "hidden_size": 64, "intermediate_size": 96}
    )
    model = tiny_architectures.make(variant)
    source = checkpoints.save_folder(tmp_path / "source", model)
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        stored = tensors.pop(name)
        random = torch.Generator().manual_seed(len(name))
        shape = stored.shape[0], stored.shape[2], stored.shape[1] // 32
        codes = torch.randint(0, 16, (*shape, 32), generator=random, dtype=torch.uint8)
        exponents = torch.randint(121, 126, shape, generator=random, dtype=torch.uint8)
        signs = torch.where(codes >= 8, -1.0, 1.0)
        values = E2M1[(codes & 7).long()] * signs * torch.exp2(exponents.float() - 127)[..., None]
        tensors[f"{name}_blocks"] = codes[..., ::2] | codes[..., 1::2] << 4
        tensors[f"{name}_scales"] = exponents
        model.get_parameter(name).data.copy_(values.flatten(2).transpose(1, 2))
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    config = msgspec.json.decode((source / "config.json").read_bytes())
    quantized = {**config, "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []}}
    (source / "config.json").write_bytes(msgspec.json.encode(quantized))
    folder = prepared(source)
    experts = {format for name, format in formats_of(folder).items() if ".experts." in name and "bias" not in name}
    assert experts == {"q8_0"}
    reference = reference_logits(model, IDS)[-1].numpy()
    assert reference.std() > 0.1
    # Other matrices became bf16.
    assert np.sqrt(np.mean((logits_of(folder) - reference) ** 2)) < 0.05 * reference.std()


def config_of(kind: str, **changes: Any) -> ModelConfig:
    sizes = {**tiny_architectures.SIZES, "vocab_size": 608, "model_type": kind}
    return ConfigReader(Path("config.json"), {**sizes, **changes}).model("tiny", [], {})


def test_both_names_of_the_number_of_experts() -> None:
    for name in ("num_experts", "num_local_experts"):
        for kind in ("mixtral", "qwen3_moe", "olmoe", "gpt_oss"):
            found = config_of(kind, **{name: 9}).experts
            assert found is not None and found.num == 9


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("glm4_moe", "n_routed_experts"),
        ("glm4_moe", "num_local_experts"),
        ("ernie4_5_moe", "moe_num_experts"),
        ("ernie4_5_moe", "num_experts"),
    ],
)
def test_names_of_the_number_of_experts_that_only_one_model_has(kind: str, name: str) -> None:
    """Of its files, or of transformers' attributes."""
    found = config_of(kind, **{name: 9}).experts
    assert found is not None and found.num == 9


def test_windows_of_qwen_moe() -> None:
    uses = {"use_sliding_window": True, "sliding_window": 30, "max_window_layers": 3}
    assert config_of("qwen2_moe", **uses).sliding_layers == [0, 2]
    assert config_of("qwen3_moe", **uses).sliding_window == 30
    assert config_of("qwen2_moe", sliding_window=0).sliding_window is None


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("mixtral", {"num_local_experts": 2, "num_experts_per_tok": 3}, r"num_experts_per_tok is 3; .* from 1 to 2"),
        ("qwen3_moe", {"num_experts": 10**6}, r"num_experts is 1000000; it must be an integer from 1 to"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, r"moe_intermediate_size is 0; it must be an integer of at least 1"),
        ("qwen2_moe", {"decoder_sparse_step": 9}, r"decoder_sparse_step is 9; .*no layer would have experts"),
        ("qwen2_moe", {"mlp_only_layers": ["a"]}, r"mlp_only_layers is \['a'\]; it must be a list of numbers"),
        ("olmoe", {"clip_qkv": 8.0}, r"clip_qkv is 8\.0: clipping"),
        ("gpt_oss", {"swiglu_limit": 0}, r"swiglu_limit is 0.*; it must be a positive number"),
        ("glm4_moe", {"n_group": 3}, r"n_group is 3; it must be a divisor of n_routed_experts = 128"),
        ("glm4_moe", {"n_group": 8, "topk_group": 9}, r"topk_group is 9; it must be an integer from 1 to n_group = 8"),
        ("glm4_moe", {"n_group": 128}, r"n_group is 128; it must be at most 64: a group has at least 2 experts"),
        (
            "glm4_moe",
            {"n_group": 32, "topk_group": 1},
            r"num_experts_per_tok is 8; it must be at most 4, the experts of topk_group groups",
        ),
        ("glm4_moe", {"first_k_dense_replace": 9}, r"first_k_dense_replace is 9; .*no layer would have experts"),
        (
            "glm4_moe",
            {"moe_intermediate_size": 1024, "n_shared_experts": 2**21},
            r"n_shared_experts is 2097152; it must be at most 2097151, of moe_intermediate_size 1024",
        ),
        ("glm4_moe", {"moe_intermediate_size": 2**31}, r"moe_intermediate_size is 2147483648; it must be an integer"),
        (
            "ernie4_5_moe",
            {"moe_intermediate_size": 2**30, "moe_num_shared_experts": None},
            r"moe_num_shared_experts is 2; it must be at most 1, of moe_intermediate_size 1073741824",
        ),
        ("ernie4_5_moe", {"use_bias": True}, r"use_bias is True: a mixture of experts with biases is not supported"),
        (
            "ernie4_5_moe",
            {"moe_layer_interval": 9},
            r"layers, .* must be a multiple of moe_layer_interval = 9: no layer",
        ),
        ("ernie4_5_moe", {"moe_layer_start_index": 9}, r"moe_layer_start_index is 9; .*no layer would have experts"),
    ],
)
def test_refused_configs(kind: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        config_of(kind, **changes)


def test_layers_behind_the_last_one_only_predict_further_tokens(tmp_path: Path) -> None:
    """As GLM-4.5's files have them: `num_nextn_predict_layers`."""
    model = tiny_architectures.make(VARIANTS["glm4_moe"])
    source = checkpoints.save_folder(tmp_path / "source", model)
    plain = logits_of(prepared(source))
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.3.eh_proj.weight"] = torch.ones(8, 8)
    tensors["model.layers.3.mlp.gate.weight"] = torch.ones(8, 8)
    more = checkpoints.save_folder(tmp_path / "more" / "source", model)
    save_file(tensors, more / "model.safetensors", {"format": "pt"})
    folder = prepared(more)
    assert "multi-token prediction is not supported" in (folder / "notes.txt").read_text("utf-8")
    np.testing.assert_array_equal(logits_of(folder), plain)
    tensors["model.layers.2.eh_proj.weight"] = torch.ones(8, 8)
    save_file(tensors, more / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.layers\.2\.eh_proj\.weight.* is not part of the model"):
        prepared(more)
