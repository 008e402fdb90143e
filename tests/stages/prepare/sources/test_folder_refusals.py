"""A Hugging Face folder that is incomplete or not supported is rejected with a clear error."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from pipeline.stages.prepare.sources.source import ModelError
from tests.stages.prepare import checkpoints
from tests.stages.prepare.sources.folders import LLAMA3, prepared


def spoil(folder: Path, how: str) -> None:  # noqa: C901 - a table of faults
    weights = folder / "model.safetensors"
    match how:
        case "no config":
            (folder / "config.json").unlink()
        case "no json":
            (folder / "config.json").write_text("{")
        case "no tokenizer":
            (folder / "tokenizer.json").unlink()
        case "bad tokenizer":
            (folder / "tokenizer.json").write_text("{}")
        case "no weights":
            weights.unlink()
        case "bin only":
            weights.rename(folder / "pytorch_model.bin")
        case "cut":
            weights.write_bytes(weights.read_bytes()[:-100])
        case "cut early":
            weights.write_bytes(weights.read_bytes()[:100])
        case "no safetensors":
            weights.write_bytes(b"\xff" * 1000)
        case "shard missing":
            weights.unlink()
            (folder / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {"a": "model-7.safetensors"}})
            )
        case "header is a list":
            weights.write_bytes(struct.pack("<Q", 2) + b"[]")
        case "header is no text":
            weights.write_bytes(struct.pack("<Q", 7) + b'{"\xff":0}'[:7])
        case "json is no text":
            (folder / "generation_config.json").write_bytes(b'{"a": "\xff"}')
        case "json is deep":
            (folder / "tokenizer_config.json").write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")
        case "template is no text":
            (folder / "chat_template.jinja").write_bytes(b"\xff")
        case "template has a name that is a list":
            (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"name": []}]}))
        case "generated ends":
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 608]}))
        case "template":
            (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"name": "rag"}]}))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("no config", r"config\.json is missing"),
        ("no json", r"config\.json is not a JSON object"),
        ("no tokenizer", r"tokenizer\.json .*is missing"),
        ("bad tokenizer", r"tokenizer\.json cannot be read"),
        ("no weights", r"safetensors files are missing"),
        ("bin only", r"pytorch_model\.bin, but only safetensors.*save_pretrained"),
        ("cut", r"model\.safetensors is truncated: \d+ bytes of \d+"),
        ("cut early", r"model\.safetensors is not a complete safetensors file"),
        ("no safetensors", r"model\.safetensors is not a complete safetensors file"),
        ("shard missing", r"index\.json names model-7\.safetensors, which is missing"),
        ("template", r"tokenizer_config\.json: chat_template must be"),
        ("header is a list", r"model\.safetensors is not a complete safetensors file"),
        ("header is no text", r"model\.safetensors is not a complete safetensors file"),
        ("json is no text", r"generation_config\.json is not a JSON object"),
        ("json is deep", r"tokenizer_config\.json is not a JSON object"),
        ("template is no text", r"chat_template\.jinja is not UTF-8"),
        ("template has a name that is a list", r"tokenizer_config\.json: chat_template must be"),
        ("generated ends", r"generation_config\.json: eos_token_id is 608; it must be an id of the vocabulary"),
    ],
)
def test_an_incomplete_folder_is_reported_with_the_missing_part(source: Path, how: str, words: str) -> None:
    spoil(source, how)
    with pytest.raises(ModelError, match=words):
        prepared(source)


@pytest.mark.parametrize("weight_map", [None, {}, [], "x", {"a": 1}, {"a": None}])
def test_an_index_without_files_is_rejected(source: Path, weight_map: Any) -> None:
    (source / "model.safetensors").unlink()
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=r"index\.json: weight_map must be an object"):
        prepared(source)


def test_a_shard_with_an_impossible_name_is_missing(source: Path) -> None:
    (source / "model.safetensors").unlink()
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x" * 5000}}))
    with pytest.raises(ModelError, match=r"names x+, which is missing"):
        prepared(source)


def test_an_unsupported_architecture_is_named_before_anything_else_that_its_folder_lacks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}')
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"model_type is 't5', which is not supported; `pipeline models --supported`"):
        prepared(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mamba"}, r"model_type is 'mamba', which is not supported; `pipeline models --sup"),
        ({"architectures": ["LlamaForQuestionAnswering"]}, r"architectures is .*LlamaForCausalLM"),
        ({"architectures": ["Qwen3ForCausalLM"]}, r"architectures is .*for model_type 'llama' only LlamaForCausalLM"),
        ({"attention_bias": "yes"}, r"config\.json: attention_bias is 'yes'; it must be true or false"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5.0}}},
            r"rope_parameters has separate parameters for 'full_attention'",
        ),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5: partial rotary embedding"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}, r"partial_rotary_factor is 0\.25"),
        (
            {"quantization_config": {"quant_method": "exl2"}},
            r"quantization_config has quant_method 'exl2', which is not",
        ),
        ({"hidden_act": "tanh"}, r"hidden_act is 'tanh'; supported are 'silu', 'swish', 'gelu'"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1.0}}, r"rope_type 'dynamic'; supported"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, r"rope_theta is 1\.0; it must be above 1"),
        ({"rope_parameters": {"rope_type": "linear"}}, r"rope_parameters\.factor is None, not a number"),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": 1.0}}, r"short_factor 1\.0; it must be a list"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, r"lacks 'low_freq_factor'"),
        ({"rope_parameters": {"rope_theta": "big"}}, r"rope_theta is 'big'"),
        ({"num_hidden_layers": None}, r"num_hidden_layers is None; it must be a positive integer"),
        ({"hidden_size": "wide"}, r"hidden_size is 'wide'"),
        ({"num_hidden_layers": 3}, r"no tensor 'model\.layers\.2\."),
        ({"intermediate_size": 128}, r"has shape \(96, 64\), config\.json says \(128, 64\)"),
        ({"num_hidden_layers": 1}, r"'model\.layers\.1\.\S+' is not part of the model"),
        ({"eos_token_id": "</s>"}, r"eos_token_id is '</s>'"),
        ({"eos_token_id": True}, r"eos_token_id is True"),
        ({"eos_token_id": [2, 608]}, r"config\.json: eos_token_id is 608; it must be an id of the vocabulary"),
        ({"eos_token_id": -1}, r"eos_token_id is -1; it must be an id of the vocabulary"),
        ({"bos_token_id": 608}, r"bos_token_id is 608; it must be an id of the vocabulary"),
        (
            {"architectures": "LlamaForCausalLM"},
            r"config\.json: architectures is 'LlamaForCausalLM'; it must be a list",
        ),
        ({"architectures": {"a": 1}}, r"architectures is \{'a': 1\}; it must be a l"),
        ({"quantization_config": "fp8"}, r"quantization_config has quant_method 'fp8', which is not served"),
        ({"num_key_value_heads": 3}, r"config\.json: num_key_value_heads is 3; it must be a divisor of num_att\S+ = 4"),
        ({"num_key_value_heads": 0}, r"num_key_value_heads is 0; it must be an integer from 1"),
        ({"head_dim": 15}, r"head_dim is 15; it must be even"),
        ({"head_dim": 0}, r"head_dim is 0; it must be an integer from 1"),
        ({"head_dim": None, "hidden_size": 66}, r"hidden_size is 66; it must be a multiple of num_attention_heads = 4"),
        ({"max_position_embeddings": 0}, r"max_position_embeddings is 0; it must be"),
        ({"max_position_embeddings": 2**40}, r"max_position_embeddings is 1099511627776; it must be"),
        ({"num_hidden_layers": 2**30}, r"num_hidden_layers is 1073741824; it must be"),
        ({"rms_norm_eps": 0}, r"rms_norm_eps is 0\.0; it must be a positive number"),
        ({"rms_norm_eps": -1e-6}, r"rms_norm_eps is -1e-06; it must be a positive number"),
        ({"rope_parameters": {"rope_theta": 0}}, r"rope_theta is 0\.0; it must be a positive number"),
        ({"rope_parameters": {"rope_theta": True}}, r"rope_theta is True, not a number"),
        (
            {"rope_parameters": {**LLAMA3, "factor": 0, "low_freq_factor": 2, "high_freq_factor": 2}},
            r"factor is 0\.0; it must be a positive number",
        ),
        (
            {"rope_parameters": {**LLAMA3, "low_freq_factor": 2, "high_freq_factor": 2}},
            r"high_freq_factor is 2\.0; it must be above low_freq_factor = 2\.0",
        ),
        (
            {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 0}},
            r"original_max_position_embeddings is 0; it must be a positive number",
        ),
    ],
)
def test_the_error_for_an_unsupported_config_names_its_key(source: Path, changes: dict[str, Any], words: str) -> None:
    checkpoints.edit_config(source, **changes)
    with pytest.raises(ModelError, match=words):
        prepared(source)
    assert not any(path.name.startswith("model-") for path in (source.parent / "cache").iterdir())
