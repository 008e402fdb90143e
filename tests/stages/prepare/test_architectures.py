"""Prepared checkpoints of every architecture, from folders and .gguf files, have the same logits as in transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.config.settings import Settings
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.stage import prepare
from tests.stages.execute.driver import Driver, row_add, settings
from tests.stages.prepare import checkpoints

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 13}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama 3": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "biased llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": 13, "head_dim": 32}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 with a window that is off": ("qwen2", {"sliding_window": 13, "max_window_layers": 0}),
    "qwen2 with windows above": ("qwen2", {**WINDOWS, "max_window_layers": 2}),
    "qwen2 with windows everywhere": ("qwen2", {**WINDOWS, "max_window_layers": 0}),
    "qwen2 with windows above all layers": ("qwen2", {**WINDOWS, "max_window_layers": 3}),
    "qwen3": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "biased qwen3": ("qwen3", {"attention_bias": True, "rope_parameters": LLAMA3}),
    "qwen3 with windows by name": (
        "qwen3",
        {**WINDOWS, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
}


def prepared(model: Path) -> Path:
    return prepare(Settings(model=str(model), cache_dir=str(model.parent / "cache")))


def logits(folder: Path, ids: list[int]) -> np.ndarray:
    """Our logits after a prompt and, one by one, after six further ids: [7, vocab_size]."""
    driver = Driver(folder, settings(kernels="torch", tokens=256))
    begun = len(ids) - 6
    rows = [driver.take_row() for _ in range(2)]
    driver.step([(rows[0], 0, begun, True)], adds=[row_add(rows[0], ids[:begun], blocks := driver.take_blocks(begun))])
    made = [driver.logits()]
    whole = [*blocks, *driver.take_blocks(len(ids) - len(blocks) * 16)]
    driver.step(drops=[rows[0]])
    for i in range(6):
        add = row_add(rows[1], ids[: begun + i + 1], whole, generation=i + 2)
        driver.step([(rows[1], begun + i, 1, True)], adds=[add])
        made.append(driver.logits())
        driver.step(drops=[rows[1]])
    return np.concatenate(made)


def expected(model: Any, ids: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0, -7:].float().numpy()


IDS = np.random.default_rng(0).integers(3, 600, 70).tolist()


@pytest.mark.parametrize("name", VARIANTS)
def test_a_folder_is_read_as_transformers_reads_it(tmp_path: Path, name: str) -> None:
    kind, changes = VARIANTS[name]
    folder = checkpoints.save_folder(tmp_path / "tiny", checkpoints.tiny(kind, **changes))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    reference = expected(theirs, IDS)
    assert reference.std() > 0.5
    np.testing.assert_allclose(logits(prepared(folder), IDS), reference, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3"])
def test_absent_keys_have_the_defaults_of_transformers(tmp_path: Path, kind: str) -> None:
    """With a minimal config.json."""
    config = {"model_type": kind, "vocab_size": 608, "hidden_size": 4096, "intermediate_size": 96}
    config |= {"num_hidden_layers": 30, "num_attention_heads": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = AutoConfig.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(checkpoints.byte_level().to_str())
    # Shapes are checked before the weights are read.
    from pipeline.stages.prepare.sources.config_json import ConfigReader

    ours = ConfigReader(tmp_path / "config.json", config).model("tiny", [], {})
    assert (ours.num_kv_heads, ours.max_position) == (theirs.num_key_value_heads, theirs.max_position_embeddings)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 128)
    assert (ours.sliding_window, ours.sliding_layers) == (theirs.sliding_window, None)
    assert (ours.tie_embeddings, ours.rms_norm_eps) == (theirs.tie_word_embeddings, theirs.rms_norm_eps)
    assert (ours.qk_norm, ours.qkv_bias, ours.out_bias) == (kind == "qwen3", kind == "qwen2", False)


def test_windows_apply_only_to_their_layers(tmp_path: Path) -> None:
    model = checkpoints.tiny("qwen2", **WINDOWS, max_window_layers=2)
    config = ModelConfig.load(prepared(checkpoints.save_folder(tmp_path / "above", model)))
    assert (config.sliding_window, config.sliding_layers) == (13, [2])
    assert [config.window_of(i) for i in range(3)] == [None, None, 13]
    model = checkpoints.tiny("qwen3", **WINDOWS, max_window_layers=0)
    config = ModelConfig.load(prepared(checkpoints.save_folder(tmp_path / "everywhere", model)))
    assert (config.sliding_window, config.sliding_layers) == (13, None)
    assert [config.window_of(i) for i in range(3)] == [13, 13, 13]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_sliding_window": "yes"}, r"use_sliding_window is 'yes'; it must be true or false"),
        ({**WINDOWS, "sliding_window": 0}, r"sliding_window is 0; it must be an integer of at least 1"),
        ({**WINDOWS, "sliding_window": True}, r"sliding_window is True; it must be an integer"),
        ({**WINDOWS, "layer_types": None, "max_window_layers": -1}, r"max_window_layers is -1; it must be an integer"),
        ({**WINDOWS, "layer_types": ["sliding_attention"]}, r"layer_types is .*list of num_hidden_layers = 3 values"),
        ({**WINDOWS, "layer_types": ["linear_attention"] * 3}, r"each one of full_attention, sliding_attention"),
        ({**WINDOWS, "layer_types": "full_attention"}, r"layer_types is 'full_attention'; it must be a list"),
        ({"use_sliding_window": False, "layer_types": ["sliding_attention"] * 3}, r"they must agree"),
        ({"head_dim": 32}, r"has shape \(64, 64\), config\.json says \(128, 64\)"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, r"rope_type 'dynamic'; supported"),
    ],
)
def test_the_error_for_an_unsupported_qwen_config_names_its_key(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    folder = checkpoints.save_folder(tmp_path / "tiny", checkpoints.tiny("qwen2"))
    checkpoints.edit_config(folder, **changes)
    with pytest.raises(ModelError, match=words):
        prepared(folder)


def test_a_qwen3_without_head_norms_is_a_clear_error(tmp_path: Path) -> None:
    folder = checkpoints.save_folder(tmp_path / "tiny", checkpoints.tiny("qwen2"))
    checkpoints.edit_config(folder, model_type="qwen3", architectures=["Qwen3ForCausalLM"], head_dim=16)
    with pytest.raises(ModelError, match=r"no tensor 'model\.layers\.0\.self_attn\.q_norm\.weight'"):
        prepared(folder)


# --- .gguf files


GGUF_VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "mistral": ("mistral", {"sliding_window": 13, "head_dim": 32}, {"llama.attention.sliding_window": 13}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}, {}),
    "qwen2 untied": ("qwen2", {}, {}),
    "qwen3": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}, {}),
}


@pytest.mark.parametrize("name", GGUF_VARIANTS)
def test_a_gguf_file_has_the_logits_of_its_original_model(tmp_path: Path, name: str) -> None:
    kind, changes, metadata = GGUF_VARIANTS[name]
    model = checkpoints.tiny(kind, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # matrices are kept in bfloat16
                parameter.copy_(parameter.bfloat16())
    path = checkpoints.save_gguf(
        tmp_path / "tiny.gguf",
        model,
        architecture="llama" if kind == "mistral" else kind,
        pre="qwen2",
        metadata=metadata,
    )
    config = ModelConfig.load(prepared(path))
    assert (config.architecture, config.qk_norm, config.qkv_bias) == (kind, kind == "qwen3", kind == "qwen2")
    np.testing.assert_allclose(logits(prepared(path), IDS), expected(model, IDS), rtol=0, atol=1e-4)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rope_scaling_is_recovered_from_llama_3s_frequency_divisors(tmp_path: Path, factor: float) -> None:
    """As llama.cpp's converter writes it: the file does not contain the scaling itself."""
    rope = {**LLAMA3, "rope_theta": 500000.0, "factor": factor, "original_max_position_embeddings": 8192}
    model = checkpoints.tiny("llama", head_dim=64, tie_word_embeddings=True, rope_parameters=rope)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(parameter.bfloat16())
    plain = 500000.0 ** -(np.arange(0, 64, 2) / 64)
    divisors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert divisors.max() == pytest.approx(factor)
    path = checkpoints.save_gguf(tmp_path / "tiny.gguf", model, extra_tensors={"rope_freqs.weight": divisors})
    theirs = expected(model, IDS)
    np.testing.assert_allclose(logits(prepared(path), IDS), theirs, rtol=0, atol=1e-4)
    without = logits(prepared(checkpoints.save_gguf(tmp_path / "plain.gguf", model)), IDS)
    assert np.abs(without - theirs).max() > 1e-3, "the scaling makes no difference here"


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"qwen2.attention.sliding_window": 13}, r"qwen2\.attention\.sliding_window is 13: a sliding window in layers"),
        ({"qwen2.rope.scaling.type": "su"}, r"qwen2\.rope\.scaling\.type is 'su'"),
        ({"qwen2.expert_count": 4}, r"qwen2\.expert_count is 4: a mixture of experts"),
        ({"qwen2.attention.head_count_kv": 3}, r"qwen2\.attention\.head_count_kv is 3; .* qwen2\.attention\.head_c"),
    ],
)
def test_the_error_for_an_unsupported_qwen_file_names_its_key(
    tmp_path: Path, metadata: dict[str, Any], words: str
) -> None:
    model = checkpoints.tiny("qwen2")
    path = checkpoints.save_gguf(tmp_path / "tiny.gguf", model, architecture="qwen2", metadata=metadata)
    with pytest.raises(ModelError, match=words):
        prepared(path)


def test_a_qwen3_file_without_head_norms_and_a_llama_file_with_them_are_rejected(tmp_path: Path) -> None:
    path = checkpoints.save_gguf(tmp_path / "a.gguf", checkpoints.tiny("qwen2"), architecture="qwen3")
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q_norm\.weight is missing"):
        prepared(path)
    model = checkpoints.tiny("qwen3", head_dim=16)
    with pytest.raises(ModelError, match=r"attn_k_norm\.weight is not part of the model that the metadata"):
        prepared(checkpoints.save_gguf(tmp_path / "b.gguf", model, architecture="llama"))


def test_texts_are_normalized_as_by_the_models_own_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    model = checkpoints.tiny("qwen2")
    for pre, composes in (("qwen2", True), ("gpt-2", False)):
        path = checkpoints.save_gguf(tmp_path / f"{pre}.gguf", model, architecture="qwen2", pre=pre)
        tokenizer = Tokenizer.from_file(str(prepared(path) / "tokenizer.json"))
        assert (tokenizer.encode("e\u0301").ids == tokenizer.encode("\u00e9").ids) == composes
