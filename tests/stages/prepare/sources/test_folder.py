"""A Hugging Face folder is served in place."""

import json
import re
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
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.rope import Llama3Rope
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.stage import prepare
from tests.stages.prepare import checkpoints
from tests.stages.prepare.sources.folders import LLAMA3, config_of, prepared

TEMPLATES = Path(__file__).parents[3] / "data" / "templates"


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
