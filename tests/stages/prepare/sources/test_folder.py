"""A Hugging Face folder is served in place, or rejected with a clear error."""

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoConfig

from pipeline.config.settings import Settings, SupervisorSettings
from pipeline.runtime.model import generation_config
from pipeline.runtime.model.generation_config import GenerationDefaults
from pipeline.runtime.model.model_config import Llama3Rope, ModelConfig
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.stage import prepare
from tests.stages.prepare import checkpoints

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


TEMPLATES = Path(__file__).parents[3] / "data" / "templates"


def prepared(folder: Path) -> Path:
    return prepare(Settings(model=str(folder), cache_dir=str(folder.parent / "cache")))


def config_of(folder: Path) -> ModelConfig:
    return ModelConfig.load(prepared(folder))


def test_weights_are_read_in_place_and_the_rest_is_written(source: Path) -> None:
    folder = prepared(source)
    config = ModelConfig.load(folder)
    assert config.weight_paths(folder) == [source / "model.safetensors"]
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode("fox").ids
    assert config == ModelConfig(
        name="tiny",
        architecture="llama",
        num_layers=2,
        hidden_size=64,
        intermediate_size=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=608,
        max_position=256,
        rms_norm_eps=1e-6,
        rope_theta=5000.0,
        tie_embeddings=False,
        eos_ids=[2],
        bos_id=1,
        weight_files=[str(source / "model.safetensors")],
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
    )


def test_all_shards_are_listed(tmp_path: Path) -> None:
    model = checkpoints.tiny_llama()
    folder = checkpoints.save_folder(tmp_path / "sharded", model, shard_size="100KB")
    paths = ModelConfig.load(prepared(folder)).weight_paths(prepared(folder))
    assert len(paths) > 2
    names = {name for path in paths for name in load_file(path)}
    assert names == set(model.state_dict())


def test_mistral_has_its_head_dim_and_window(tmp_path: Path) -> None:
    config = config_of(checkpoints.save_folder(tmp_path / "mistral", checkpoints.tiny_mistral()))
    assert (config.architecture, config.head_dim, config.sliding_window) == ("mistral", 32, 32)
    everywhere = checkpoints.tiny_mistral(sliding_window=None)
    assert config_of(checkpoints.save_folder(tmp_path / "full", everywhere)).sliding_window is None


def test_biases_and_tied_embeddings_are_detected(tmp_path: Path) -> None:
    model = checkpoints.tiny_llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    config = config_of(checkpoints.save_folder(tmp_path / "biased", model))
    assert (config.qkv_bias, config.out_bias, config.mlp_bias, config.tie_embeddings) == (True, True, True, True)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_parameters": {**LLAMA3, "rope_theta": 7000.0}},
        {"rope_parameters": None, "rope_scaling": LLAMA3, "rope_theta": 7000.0},
        {"rope_parameters": None, "rope_scaling": {**LLAMA3, "type": "llama3"}, "rope_theta": 7000.0},
    ],
)
def test_rope_is_read_from_old_and_new_keys(source: Path, spelling: dict[str, Any]) -> None:
    checkpoints.edit_config(source, **spelling)
    config = config_of(source)
    assert config.rope_theta == 7000.0
    assert config.rope_scaling == Llama3Rope(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
    )


def test_old_rope_keys_win_over_new_ones_as_in_transformers(source: Path) -> None:
    both = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "rope_scaling": LLAMA3}
    checkpoints.edit_config(source, **both, rope_theta=7000.0)
    theirs = AutoConfig.from_pretrained(source).rope_parameters
    config = config_of(source)
    assert isinstance(config.rope_scaling, Llama3Rope)
    assert (config.rope_scaling.factor, config.rope_theta) == (theirs["factor"], theirs["rope_theta"]) == (8.0, 7000.0)


def test_an_old_config_without_newer_keys_has_the_old_defaults(source: Path) -> None:
    checkpoints.edit_config(source, rope_parameters=None, head_dim=None, attention_bias=None, mlp_bias=None)
    config = config_of(source)
    assert (config.rope_theta, config.rope_scaling, config.head_dim) == (10000.0, None, 16)


def test_all_eos_ids_count_and_the_tokenizers_own_comes_first(source: Path) -> None:
    checkpoints.edit_config(source, eos_token_id=[5, 2])
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 5]}))
    assert config_of(source).eos_ids == [2, 5, 9]


def test_the_ends_of_replies_in_the_chat_format_end_a_sequence_too(source: Path) -> None:
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|call|>", "<|return|>"])
    tokenizer.save(str(source / "tokenizer.json"))
    call, end = tokenizer.token_to_id("<|call|>"), tokenizer.token_to_id("<|return|>")
    assert config_of(source).eos_ids == [2]
    (source / "chat_template.jinja").write_text((TEMPLATES / "gpt-oss.jinja").read_text())
    assert config_of(source).eos_ids == [2, call, end]


def test_recommended_sampling_parameters_are_kept(source: Path) -> None:
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "temperature": 0.6, "top_k": None}))
    defaults = generation_config.load(Settings(), prepared(source))
    assert defaults == GenerationDefaults(temperature=0.6)


def test_it_is_detected_whether_the_tokenizer_adds_bos(tmp_path: Path) -> None:
    folder = checkpoints.save_folder(tmp_path / "bos", checkpoints.tiny_llama(), add_bos=True)
    assert config_of(folder).add_bos


@pytest.mark.parametrize(
    "template", ["{{ one }}", [{"name": "rag", "template": "no"}, {"name": "default", "template": "{{ one }}"}]]
)
def test_the_chat_template_may_be_in_the_tokenizers_config(source: Path, template: Any) -> None:
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert (prepared(source) / "chat_template.jinja").read_text() == "{{ one }}"
    (source / "chat_template.jinja").write_text("{{ its own file }}")
    assert (prepared(source) / "chat_template.jinja").read_text() == "{{ its own file }}"


def test_a_tool_template_is_kept_in_addition_to_the_default(source: Path) -> None:
    named = [{"name": "tool_use", "template": "{{ tools }}"}, {"name": "default", "template": "{{ one }}"}]
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    folder = prepared(source)
    assert (folder / "chat_template.jinja").read_text() == "{{ one }}"
    assert (folder / "chat_template.tool_use.jinja").read_text() == "{{ tools }}"
    (source / "chat_template.jinja").write_text("{{ its own file }}")
    assert not (prepared(source) / "chat_template.tool_use.jinja").exists()
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}{{ too }}")
    assert (prepared(source) / "chat_template.tool_use.jinja").read_text() == "{{ tools }}{{ too }}"


def test_a_model_without_a_template_has_none(source: Path) -> None:
    assert not (prepared(source) / "chat_template.jinja").exists()


def test_a_changed_file_is_prepared_again_and_an_unchanged_one_is_not(source: Path) -> None:
    first = prepared(source)
    assert prepared(source) == first
    checkpoints.edit_config(source, eos_token_id=3)
    assert ModelConfig.load(prepared(source)).eos_ids == [2, 3]


def test_an_old_tokenizer_format_is_converted(source: Path) -> None:
    tokenizer = json.loads((source / "tokenizer.json").read_text())["model"]
    (source / "tokenizer.json").unlink()
    (source / "vocab.json").write_text(json.dumps(tokenizer["vocab"]))
    (source / "merges.txt").write_text("\n".join(" ".join(pair) for pair in tokenizer["merges"]))
    (source / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"})
    )
    converted = Tokenizer.from_file(str(prepared(source) / "tokenizer.json"))
    original = checkpoints.byte_level()
    for text in checkpoints.TEXTS:
        assert converted.encode(text).ids == original.encode(text).ids


def edit_tokenizer(source: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change the content of a folder's tokenizer.json."""
    path = source / "tokenizer.json"
    state = json.loads(path.read_text())
    edit(state)
    path.write_text(json.dumps(state))


def template_with(token_id: int) -> dict[str, Any]:
    """A post-processor that prepends an id to each text."""
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"x": {"id": "x", "ids": [token_id], "tokens": ["x"]}},
    }


ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
GIVES_ID: dict[str, tuple[Callable[[dict[str, Any], int], Any], str]] = {
    "the vocabulary": (lambda state, i: state["model"]["vocab"].update(a=i), r"its vocabulary gives 'a'"),
    "an added token": (
        lambda state, i: state["added_tokens"].append({"id": i, "content": "<x>"} | ADDED),
        r"added_tokens gives '<x>'",
    ),
    "a template": (lambda state, i: state.update(post_processor=template_with(i)), r"post_processor has"),
    "an end": (
        lambda state, i: state.update(post_processor={"type": "BertProcessing", "sep": ["x", i], "cls": ["<s>", 1]}),
        r"post_processor has",
    ),
    "a template among others": (
        lambda state, i: state.update(post_processor={"type": "Sequence", "processors": [template_with(i)]}),
        r"post_processor has",
    ),
}


@pytest.mark.parametrize("token_id", [2**31, 2**32 - 1])
@pytest.mark.parametrize("file", GIVES_ID)
def test_token_ids_beyond_int32_are_reported(source: Path, file: str, token_id: int) -> None:
    edit, words = GIVES_ID[file]
    edit_tokenizer(source, lambda state: edit(state, token_id))
    message = rf"tokenizer\.json: {words} the token id {token_id}; the largest supported id is 2147483647"
    with pytest.raises(ModelError, match=message):
        prepared(source)


@pytest.mark.parametrize("file", GIVES_ID)
def test_the_largest_int32_is_a_token_id(source: Path, file: str) -> None:
    edit, _ = GIVES_ID[file]
    edit_tokenizer(source, lambda state: edit(state, 2**31 - 1))
    assert prepared(source)


def test_token_ids_of_an_old_tokenizer_format_are_checked(source: Path) -> None:
    tokenizer = json.loads((source / "tokenizer.json").read_text())["model"]
    (source / "tokenizer.json").unlink()
    (source / "vocab.json").write_text(json.dumps(tokenizer["vocab"] | {"a": 2**31}))
    (source / "merges.txt").write_text("")
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "unk_token": "<unk>"}')
    with pytest.raises(ModelError, match=r"its vocabulary gives 'a' the token id 2147483648"):
        prepared(source)


def test_an_inconsistent_old_tokenizer_format_is_reported(source: Path) -> None:
    (source / "tokenizer.json").unlink()
    (source / "vocab.json").write_text('{"a": 0}')
    (source / "merges.txt").write_text("x y")
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    with pytest.raises(ModelError, match=r"has vocab\.json only, and transformers cannot make .*vocabulary"):
        prepared(source)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        # The library panics on the first when it reads it, and on the second with each text.
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, r"tokenizer\.json cannot be read: "),
        ("pre_tokenizer", {"type": "FixedLength", "length": 0}, r"tokenizer.json cannot be read: chunk size"),
        (
            "model",
            {"type": "WordLevel", "vocab": {}, "unk_token": "x"},
            r"tokenizer.json cannot be read: WordLevel error",
        ),
    ],
)
def test_an_unusable_tokenizer_is_reported(source: Path, part: str, value: Any, message: str) -> None:
    edit_tokenizer(source, lambda state: state.update({part: value}))
    with pytest.raises(ModelError, match=message):
        prepared(source)


@pytest.mark.parametrize(
    "name",
    [
        *("vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json", "vocab.txt", "spiece.model"),
        *("tokenizer.model", "chat_template.jinja"),
    ],
)
def test_a_change_of_any_tokenizer_file_is_noticed(source: Path, name: str) -> None:
    (source / name).write_text("{}")
    first = prepared(source)
    (source / name).write_text("{ }")
    assert prepared(source) != first


def in_sub_folder(source: Path) -> Path:
    """Move the weights into a subfolder, where only the index refers to them."""
    shard = source / "shards" / "one.safetensors"
    shard.parent.mkdir()
    (source / "model.safetensors").rename(shard)
    index = {"weight_map": dict.fromkeys(load_file(shard), "shards/one.safetensors")}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    return shard


def test_a_changed_shard_in_a_sub_folder_is_noticed(source: Path) -> None:
    shard = in_sub_folder(source)
    folder = prepared(source)
    assert ModelConfig.load(folder).weight_paths(folder) == [shard]
    assert prepared(source) == folder
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"one\.safetensors is truncated"):
        prepared(source)


def test_a_folder_may_have_a_name_of_maximum_length(source: Path) -> None:
    renamed = source.rename(source.parent / ("\N{DESERET SMALL LETTER EW}" * 63))
    assert config_of(renamed).name == renamed.name


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


def test_tokens_beyond_the_vocabulary_are_rejected(source: Path) -> None:
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_special_tokens([f"<{i}>" for i in range(700)])
    tokenizer.save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<699>"}))
    with pytest.raises(
        ModelError, match=r"tokenizer_config\.json: the id of eos_token is \d+; it must be an id of the voc"
    ):
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
        ({"architectures": ["LlamaForSequenceClassification"]}, r"architectures is .*LlamaForCausalLM"),
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


def test_a_chat_template_that_takes_long_to_recognize_meets_the_timeout_of_the_start(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hangs(*_: Any) -> None:
        re.fullmatch(r"(a+)+b", "a" * 60)

    monkeypatch.setattr("pipeline.stages.prepare.tokenizers.reply_ends.ChatFormats.load", hangs)
    (source / "chat_template.jinja").write_text("{{ messages }}")
    settings = msgspec.structs.replace(
        Settings(model=str(source), cache_dir=str(source.parent / "cache")),
        supervisor=SupervisorSettings(start_timeout_s=0.2),
    )
    with pytest.raises(ModelError, match=r"chat template took more than 0\.2 s \(supervisor\.start_timeout_s\)"):
        prepare(settings)


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece", "prefix": "##", "cleanup": True}])
def test_a_decoder_that_needs_whole_texts_is_refused_before_any_stage_starts(source: Path, decoder: Any) -> None:
    parts = json.loads((source / "tokenizer.json").read_text())
    (source / "tokenizer.json").write_text(json.dumps({**parts, "decoder": decoder}))
    with pytest.raises(
        ModelError, match=r"tiny/tokenizer\.json: the decoder in the model's tokenizer\.json is not supp"
    ):
        prepared(source)
