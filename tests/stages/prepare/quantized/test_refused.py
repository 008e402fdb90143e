"""The errors for checkpoints that can't be served name the key or the tensor, and what would be right."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.config.settings import Settings
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.stage import prepare
from tests.stages.prepare import checkpoints
from tests.stages.prepare.quantized import packers
from tests.stages.prepare.quantized.schemes import AWQ, CASES, FP8, auto_round, bnb, compressed, gptq

Q = "model.layers.0.self_attn.q_proj"


def prepared(source: Path) -> Path:
    return prepare(Settings(model=str(source), cache_dir=str(source.parent / "cache")))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with float weights; its config.json is edited."""
    return checkpoints.save_folder(tmp_path_factory.mktemp("plain") / "tiny", checkpoints.tiny("llama"))


def damaged(folder: Path, name: str, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """A checkpoint of the case `name` whose tensors are changed."""
    source = folder / "tiny"
    packers.save(source, checkpoints.tiny("llama", num_hidden_layers=1), CASES[name].config, CASES[name].pack)
    path = source / "model.safetensors"
    tensors = {key: tensor.clone() for key, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, {"format": "pt"})
    return source


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"quant_method": "hqq"},
            r"has quant_method 'hqq', which is not served; served are gptq, awq, auto-round, comp",
        ),
        ("fp8", r"has quant_method 'fp8', which is not served"),
        ({"bits": 4}, r"has quant_method None, which is not served"),
        ({"quant_method": "gptq"}, r"\(gptq\): Object missing required field `bits`"),
        (gptq(5, 128), r"\(gptq\): bits is 5; served are 2, 3, 4, 8"),
        ({**gptq(4, 128), "bits": "4"}, r"\(gptq\): Expected `int`, got `str` - at `\$\.bits`"),
        (gptq(4, 128, checkpoint_format="marlin"), r"checkpoint_format is 'marlin'; served are 'gptq' and 'gptq_v2'"),
        (gptq(4, 128, is_marlin_format=True), r"checkpoint_format is 'marlin'"),
        (gptq(4, 128, pack_dtype="int8"), r"pack_dtype is 'int8'; int32 is served"),
        ({**AWQ, "bits": 8}, r"\(awq\): bits is 8; with awq, 4 is served"),
        ({**AWQ, "version": "gemv"}, r"version is 'gemv'; with awq, 'gemm' is served"),
        ({**AWQ, "backend": "llm-awq"}, r"backend is 'llm-awq'; with awq, 'autoawq' is served"),
        (
            auto_round("auto_round:fp8_static"),
            r"packing_format is 'auto_round:fp8_static'; with auto-round, served are",
        ),
        ({**auto_round("auto_round"), "data_type": "mx_fp"}, r"data_type is 'mx_fp'; with auto-round, 'int' is served"),
        ({**auto_round("auto_round"), "act_bits": 8}, r"act_bits is 8; with auto-round, 16-bit"),
        ({**auto_round("auto_round"), "rotation_config": {"a": 1}}, r"rotation_config is set"),
        (
            compressed("nvfp4-pack-quantized", num_bits=4, type="float"),
            r"format is 'nvfp4-pack-quantized'; with compressed-tensors, served are pack-quantized, int-quantized, ",
        ),
        (compressed("pack-quantized", num_bits=3), r"weights of type 'int' with 3 bits; served are int with 2, 4, 8"),
        (compressed("float-quantized", num_bits=6, type="float"), r"type 'float' with 6 bits; .*float with 8 \(FP8\)"),
        ({**compressed("int-quantized"), "transform_config": {"u": {}}}, r"transform_config is set"),
        (
            {**compressed("int-quantized"), "sparsity_config": {"format": "sparse-24-bitmask"}},
            r"sparsity_config has format 'sparse-24-bitmask'; 'dense' is served",
        ),
        ({**compressed("int-quantized"), "config_groups": {}}, r"config_groups has no group with weights"),
        ({**bnb("nf4"), "bnb_4bit_quant_type": "int4"}, r"bnb_4bit_quant_type is 'int4'; served are nf4, fp4"),
        ({"quant_method": "bitsandbytes"}, r"must have either load_in_4bit or load_in_8bit"),
        ({**FP8, "weight_block_size": [0, 128]}, r"weight_block_size is \[0, 128\]; both numbers must be positive"),
        (gptq(4, 128), r"\(gptq, 4 bits, .*\), but no weight of the model is quantized that way"),
    ],
)
def test_the_error_for_a_config_names_its_key(plain: Path, config: Any, words: str) -> None:
    checkpoints.edit_config(plain, quantization_config=config)
    with pytest.raises(ModelError, match=words):
        prepared(plain)


@pytest.mark.parametrize(
    ("name", "part", "words"),
    [
        ("gptq", "scales", r"q_proj\.qweight' needs '.*q_proj\.scales', which is missing"),
        ("gptq", "qzeros", r"q_proj\.qweight' needs '.*q_proj\.qzeros', which is missing"),
        ("gptq", "qweight", r"no tensor '.*q_proj\.weight', which config\.json requires"),
        ("awq", "qzeros", r"q_proj\.qweight' needs '.*q_proj\.qzeros'"),
        ("packed", "weight_scale", r"q_proj\.weight_packed' needs '.*weight_scale'"),
        ("int8", "weight_scale", r"q_proj\.weight' needs '.*weight_scale'"),
        ("nf4", "weight.absmax", r"q_proj\.weight' needs '.*weight\.absmax'"),
        ("nf4", "weight.quant_map", r"q_proj\.weight' needs '.*weight\.quant_map'"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", r"needs '.*quant_state\.bitsandbytes__nf4'"),
        ("nf4, quantized scales", "weight.nested_absmax", r"absmax' needs '.*nested_absmax'"),
        ("llm.int8", "SCB", r"q_proj\.weight' needs '.*SCB'"),
        (
            "fp8, blocks",
            "weight_scale_inv",
            r"is F8_E4M3 and needs .*weight_scale_inv or .*weight_scale, which are mis",
        ),
        ("mxfp4", "weight_scales", r"weight_blocks' needs '.*weight_scales'"),
    ],
)
def test_the_error_for_a_missing_tensor_names_it(tmp_path: Path, name: str, part: str, words: str) -> None:
    source = damaged(tmp_path, name, lambda tensors: tensors.pop(f"{Q}.{part}"))
    with pytest.raises(ModelError, match=words):
        prepared(source)


def put(part: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    def apply(tensors: dict[str, Tensor]) -> None:
        tensors[f"{Q}.{part}"] = change(tensors[f"{Q}.{part}"]).contiguous()

    return apply


def cut(tensor: Tensor) -> Tensor:
    return tensor[:-1]


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (
            "gptq",
            put("qweight", cut),
            r"q_proj\.qweight' has shape \[7, 64\]; config\.json makes the weight \[64, 64\]",
        ),
        ("gptq", put("scales", lambda t: t[:, 1:]), r"q_proj\.scales' has shape \[2, 63\]; it must be \[groups, 64\]"),
        ("gptq", put("scales", lambda t: t.repeat(3, 1)[:5]), r"scales' has 5 groups; group_size 32 gives 2"),
        ("gptq", put("scales", lambda t: t * torch.inf), r"q_proj\.scales' has values that are not finite"),
        ("gptq", put("qzeros", cut), r"q_proj\.qzeros' has shape \[1, 8\]; it must be \[2, 8\]"),
        ("gptq", put("qzeros", lambda t: t.float()), r"q_proj\.qzeros' is F32; it must be I32"),
        ("gptq", put("g_idx", lambda t: t + 1), r"q_proj\.g_idx' has groups from 1 to 2; it must be 0 to 1"),
        ("gptq", put("g_idx", cut), r"q_proj\.g_idx' has shape \[63\]; it must be \[64\]"),
        ("awq", put("qweight", cut), r"q_proj\.qweight' has shape \[63, 8\]; it must be \[64, 8\]"),
        (
            "packed",
            put("weight_packed", cut),
            r"weight_packed' has shape \[63, 8\]; config\.json makes the weight \[64",
        ),
        ("packed", put("weight_shape", lambda t: t + 1), r"weight_shape' is \[65, 65\], config\.json says \[64, 64\]"),
        (
            "packed",
            put("weight_scale", lambda t: t.repeat(1, 3)[:, :5]),
            r"weight_scale' has shape \[64, 5\]; it must be",
        ),
        ("packed asym", put("weight_zero_point", cut), r"weight_zero_point' has shape \[7, 2\]; it must be \[8, 2\]"),
        ("int8", put("weight", cut), r"q_proj\.weight' has shape \[63, 64\]; it must be \[64, 64\]"),
        ("int8", put("weight_scale", lambda t: t * torch.nan), r"weight_scale' has values that are not finite"),
        ("nf4", put("weight", cut), r"q_proj\.weight' has 2047 bytes; \[64, 64\] takes 2048"),
        ("nf4", put("weight.absmax", cut), r"weight\.absmax' has shape \[63\]; it must be \[64\]"),
        ("nf4", put("weight.quant_map", cut), r"weight\.quant_map' has shape \[15\]; it must be \[16\]"),
        ("nf4", put("weight.quant_state.bitsandbytes__nf4", cut), r"bitsandbytes__nf4' is not bitsandbytes' JSON"),
        (
            "llm.int8",
            put("weight_format", lambda t: t + 1),
            r"weight_format' is 1; only 0 is served, the order of rows",
        ),
        (
            "fp8, blocks",
            put("weight_scale_inv", cut),
            r"weight_scale_inv' has shape \[1, 2\]; for a weight of \[64, 64\]",
        ),
        (
            "mxfp4",
            put("weight_scales", lambda t: t * 0 + 255),
            r"weight_scales' has the exponent 255, which is not a num",
        ),
        (
            "gptq",
            lambda tensors: tensors.update({f"{Q}.bias": torch.ones(64)}),
            r"q_proj\.bias' is a bias that config\.json doesn't describe, and not zero",
        ),
        (
            "gptq",
            lambda tensors: tensors.update({f"{Q}.lora_a": torch.ones(1)}),
            r"lora_a' is not part of the model that config\.json describes",
        ),
    ],
)
def test_the_error_for_a_broken_tensor_names_it(tmp_path: Path, name: str, change: Any, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        prepared(damaged(tmp_path, name, change))


def test_packed_weights_without_a_config_are_named(tmp_path: Path) -> None:
    source = damaged(tmp_path, "gptq", lambda tensors: None)
    checkpoints.edit_config(source, quantization_config=None)
    with pytest.raises(
        ModelError, match=r"q_proj\.weight', which .*: they are quantized, but config\.json has no quant"
    ):
        prepared(source)
