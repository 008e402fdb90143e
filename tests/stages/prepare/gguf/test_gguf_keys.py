"""Every key of a .gguf file counts, has a rule in stages/prepare/gguf/unused_keys.py, or is named at the start."""

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from pipeline.config.settings import Settings
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.model_folder import notes_of
from pipeline.stages.prepare.gguf.model import ENCODERS
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.stage import prepare
from tests.stages.execute import tiny_architectures
from tests.stages.execute.tiny_architectures import VARIANTS
from tests.stages.prepare import checkpoints
from tests.stages.prepare.gguf.architectures import CASES, EXPERTS, GGUF_ONLY, A, Case, norms_plus_one, permuted, save


def prepared(path: Path) -> Path:
    return prepare(Settings(model=str(path), cache_dir=str(path.parent / "cache")))


def file(tmp_path: Path, **metadata: Any) -> Path:
    """A Llama with further keys; double underscores in names are dots."""
    keys = {name.replace("__", "."): value for name, value in metadata.items()}
    return checkpoints.save_gguf(tmp_path / "tiny.gguf", checkpoints.tiny_llama(), metadata=keys)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("llama.attention.causal", False, "llama.attention.causal is False: attention to later tokens is not supp"),
        ("llama.rope.scaling.attn_factor", 1.5, "rope.scaling.attn_factor is 1.5: a factor of rotated queries"),
        ("llama.rope.scaling.yarn_ext_factor", 0.5, "rope.scaling.yarn_ext_factor is 0.5: a part of YaRN is"),
        ("llama.nextn_predict_layers", 1, "nextn_predict_layers is 1: a file with layers for several tokens"),
        ("llama.expert_gating_func", 2, "expert_gating_func is 2: scores of experts that are no softmax"),
        ("llama.rope.dimension_sections", [4, 6, 6, 0], "dimension_sections is set: a rotary embedding for images"),
        ("llama.rope.scaling.type", "dynamic", "rope.scaling.type is 'dynamic': this rope scaling is not supported"),
        ("llama.rope.scaling.factor", -2.0, "rope.scaling.factor is -2; it must be a positive number"),
        ("llama.rope.scale_linear", float("nan"), "rope.scale_linear is nan; it must be a positive number"),
    ],
)
def test_a_key_that_changes_what_is_computed_is_not_ignored(tmp_path: Path, key: str, value: Any, words: str) -> None:
    with pytest.raises(ModelError) as raised:
        prepared(file(tmp_path, **{key: value}))
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_values_that_change_nothing_are_accepted_and_other_unused_keys_are_named(tmp_path: Path) -> None:
    harmless = {
        "llama.attention.causal": True,
        "llama.rope.scaling.attn_factor": 1.0,
        "llama.rope.dimension_sections": [0, 0, 0, 0],
        "llama.rope.freq_base_swa": 10000.0,  # there are no windows
        "llama.nextn_predict_layers": 0,
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.finetuned": False,
        "llama.vocab_size": 608,
        "general.license": "mit",
    }
    assert notes_of(prepared(file(tmp_path, **harmless))) == []
    unused = {
        "llama.attention.scale": 0.5,
        "general.sampling.mirostat": 2,
        "general.sampling.temp": 0.5,
        "tokenizer.chat_template.rag": "{{ messages }}",
    }
    assert notes_of(prepared(file(tmp_path, **harmless, **unused))) == [
        "the file's keys 'general.sampling.mirostat' are not used as recommendations for sampling",
        "the file's keys 'tokenizer.chat_template.rag' are not used as chat templates",
        "the file's keys 'llama.attention.scale' are not used",
    ]


def test_files_as_the_converter_writes_them_have_no_unused_keys(tmp_path: Path) -> None:
    for name, case in CASES.items():
        if name in ("gpt-oss", "gemma3, other windows", "qwen2moe", "bloom", "mpt"):
            model = tiny_architectures.make(GGUF_ONLY.get(case.variant) or VARIANTS[case.variant])
            pattern = [True] * 3 if "other windows" in name else None
            metadata = {**case.metadata, **({"attention.sliding_window_pattern": pattern} if pattern else {})}
            path = save(
                tmp_path / f"{name}.gguf", model, Case(case.variant, case.arch, metadata, case.convert, case.pre)
            )
            assert notes_of(prepared(path)) == [], name


@pytest.mark.parametrize("name", ["gemma2", "olmo3", "olmo3, yarn"])
def test_a_base_of_its_own_in_layers_with_windows_is_not_ignored(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    model = tiny_architectures.make(GGUF_ONLY.get(case.variant) or VARIANTS[case.variant])
    keys = {**case.metadata, "rope.freq_base_swa": 77.0}
    path = save(tmp_path / "tiny.gguf", model, dataclasses.replace(case, metadata=keys))
    with pytest.raises(ModelError, match=r"\.rope\.freq_base_swa is 77\.0: another rotary embedding in layers with"):
        prepared(path)


def test_a_gemma_2_without_a_key_for_it_has_the_window_of_llama_cpp(tmp_path: Path) -> None:
    model = tiny_architectures.make(VARIANTS["gemma2"])
    config = ModelConfig.load(prepared(save(tmp_path / "a.gguf", model, Case("gemma2", A.GEMMA2, {}, norms_plus_one))))
    assert (config.sliding_window, config.sliding_layers) == (4096, [0, 2])
    none = Case("gemma2", A.GEMMA2, {"attention.sliding_window": 0}, norms_plus_one)
    assert ModelConfig.load(prepared(save(tmp_path / "b.gguf", model, none))).sliding_window is None


def test_a_granite_without_rotary_embedding_is_refused(tmp_path: Path) -> None:
    model = tiny_architectures.make(VARIANTS["granite"])
    case = Case("granite", A.GRANITE, {**CASES["granite"].metadata, "rope.scaling.finetuned": False}, permuted)
    with pytest.raises(ModelError, match=r"rope\.scaling\.finetuned is False: a model without rotary embedding"):
        prepared(save(tmp_path / "tiny.gguf", model, case))


def test_numbers_of_experts_may_be_given_for_each_layer(tmp_path: Path) -> None:
    """As in llama.cpp, which reads them so (`get_key_or_arr`)."""
    model = tiny_architectures.make(VARIANTS["qwen3_moe"])
    whole: dict[str, Any] = {**EXPERTS, "expert_feed_forward_length": 32}
    lists: dict[str, Any] = {**whole, "expert_used_count": [3, 3, 3], "expert_feed_forward_length": [32, 32, 32]}
    configs = [
        ModelConfig.load(prepared(save(tmp_path / f"{i}.gguf", model, Case("", A.QWEN3MOE, keys, pre="qwen2"))))
        for i, keys in enumerate((whole, lists))
    ]
    assert configs[0].experts == configs[1].experts
    other = {**whole, "expert_used_count": [3, 2, 3]}
    with pytest.raises(ModelError, match=r"expert_used_count is .*: layers of different sizes are not supported"):
        prepared(save(tmp_path / "other.gguf", model, Case("", A.QWEN3MOE, other, pre="qwen2")))


def test_scalings_in_two_forms_are_refused(tmp_path: Path) -> None:
    tensors = {"rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)}
    keys = {"llama.rope.scaling.factor": 2.0}
    path = checkpoints.save_gguf(tmp_path / "tiny.gguf", checkpoints.tiny_llama(), metadata=keys, extra_tensors=tensors)
    with pytest.raises(ModelError, match=r"rope_freqs\.weight beside another rope scaling is not supported"):
        prepared(path)


@pytest.mark.parametrize("architecture", sorted(ENCODERS))
def test_an_encoder_is_refused_by_name_before_anything_else_is_read(tmp_path: Path, architecture: str) -> None:
    """Most have a WordPiece vocabulary, which files of decoders may have, too."""
    writer = gguf.GGUFWriter(tmp_path / "encoder.gguf", architecture)
    writer.add_tokenizer_model("bert")
    writer.add_token_list(["[UNK]", "a", "##b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    message = f"general.architecture is '{architecture}', an encoder that is not supported"
    with pytest.raises(ModelError, match=message):
        prepare(Settings(model=str(tmp_path / "encoder.gguf"), cache_dir=str(tmp_path / "cache")))


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"xielu.alpha_p": [0.8, 0.8]}, r"xielu\.alpha_p has 2 values; the model has 3 layers"),
        ({"xielu.eps": "none"}, r"xielu\.eps is 'none', not of type"),
        ({"xielu.beta": ["0.5", "0.5", "0.5"]}, r"xielu\.beta has values that are not of type"),
    ],
)
def test_parameters_of_an_activation_that_a_file_lacks_are_named(
    tmp_path: Path, keys: dict[str, Any], match: str
) -> None:
    case = dataclasses.replace(CASES["apertus"], metadata=keys)
    path = save(tmp_path / "tiny.gguf", tiny_architectures.make(VARIANTS["apertus"]), case)
    with pytest.raises(ModelError, match=match):
        prepare(Settings(model=str(path), cache_dir=str(tmp_path / "cache")))


def test_parameters_of_an_activation_may_stand_once(tmp_path: Path) -> None:
    case = dataclasses.replace(CASES["apertus"], metadata={"xielu.beta": 0.5})
    path = save(tmp_path / "tiny.gguf", tiny_architectures.make(VARIANTS["apertus"]), case)
    assert ModelConfig.load(prepare(Settings(model=str(path), cache_dir=str(tmp_path / "cache")))).activation == "xielu"
