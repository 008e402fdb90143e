"""A folder has the logits that transformers computes from it, whatever form it has, or is refused by name.

PIPELINE_ALL_CASES=1 pytest tests/stages/prepare/sources/test_forms.py      all forms, in ten seconds
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from pipeline.config.settings import Settings
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.model_folder import notes_of
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.stage import longrope_line, prepare
from tests.stages.execute.driver import Driver, row_add, settings
from tests.stages.prepare import checkpoints, forms
from tests.stages.prepare.forms import INDEX, Folder, random_head

MAX_ERROR = 1e-4
IDS = np.random.default_rng(0).integers(3, 600, 40).tolist()
Change = Callable[[Folder], None]


def prepared(source: Path) -> Path:
    return prepare(Settings(model=str(source), cache_dir=str(source.parent / "cache")))


def logits_of(folder: Path) -> np.ndarray:
    driver = Driver(folder, settings())
    driver.step([(0, 0, 40, True)], adds=[row_add(0, IDS, driver.take_blocks(40))])
    made: np.ndarray = driver.logits()[0]
    return made


def renames(**prefixes: str) -> Change:
    """Replace prefixes of names; double underscores are dots."""

    def change(name: str) -> str:
        for before, after in prefixes.items():
            if name.startswith(prefix := before.replace("__", ".")):
                return after + name.removeprefix(prefix)
        return name

    return lambda folder: folder.rename(change)


def config(**changes: Any) -> Change:
    return lambda folder: folder.config(**changes)


def text_config(**changes: Any) -> Change:
    return lambda folder: folder.text_config(**changes)


def without(*keys: str, part: str | None = None) -> Change:
    return lambda folder: folder.without(*keys, part=part)


def add(**tensors: Any) -> Change:
    return lambda folder: folder.add(**tensors)


def head(name: str = "lm_head.weight", dtype: torch.dtype = torch.float32) -> Change:
    """Another head than the embedding."""
    return lambda folder: folder.save({**folder.tensors, name: random_head(dtype)})


def same_head(name: str, embedding: str) -> Change:
    return lambda folder: folder.save({**folder.tensors, name: folder.tensors[embedding]})


def only_head(name: str, embedding: str) -> Change:
    return lambda folder: folder.rename(lambda tensor: name if tensor == embedding else tensor)


def sharded(folder: Folder) -> None:
    tensors = folder.tensors
    names = sorted(tensors)
    folder.shards({name: tensors[name] for name in names[::2]}, {name: tensors[name] for name in names[1::2]})


def twice(values: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """A tensor in two shards, of which the index names the first."""

    def change(folder: Folder) -> None:
        tensors, name = folder.tensors, "model.norm.weight"
        index = {
            **dict.fromkeys(tensors, "model-00001-of-00002.safetensors"),
            "none": "model-00002-of-00002.safetensors",
        }
        folder.shards(tensors, {name: values(tensors[name])}, index=index)

    return change


def stale_index(folder: Folder) -> None:
    """An index of shards that are gone, beside a file with everything."""
    (folder.path / INDEX).write_text('{"weight_map": {"lm_head.weight": "model-00007-of-00009.safetensors"}}')


def other_shards(folder: Folder) -> None:
    """An index of complete shards with other values, beside a file with everything."""
    tensors = folder.tensors
    folder.shards({name: torch.randn_like(value) for name, value in tensors.items()})
    folder.save(tensors)


def flat(folder: Folder) -> None:
    """The keys of the text model beside vision_config, as older versions of transformers write Qwen-VL."""
    before = json.loads((folder.path / "config.json").read_text())
    text = before.pop("text_config")
    rope = text.pop("rope_parameters")
    theirs = {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    (folder.path / "config.json").write_text(json.dumps({**text, **theirs, **before}))


def as_on_the_hub(folder: Folder) -> None:
    folder.rename(lambda name: name.replace("model.language_model.", "model.").replace("model.visual.", "visual."))


MODEL = "language_model.model."
EMBEDDING = f"{MODEL}embed_tokens.weight"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
BUFFERS = {f"model__layers__{i}__self_attn__rotary_emb__inv_freq": torch.ones(8) for i in range(2)}
MASKS = {
    f"h__{i}__attn__{name}": value
    for i in range(3)
    for name, value in (("bias", torch.ones(1, 1, 8, 8)), ("masked_bias", torch.tensor(-1e4)))
}
NEOX_MASKS = {"gpt_neox__layers__0__attention__bias": torch.ones(1, 1, 8, 8).bool()}

HEADS: dict[str, tuple[str, list[Change], str]] = {
    "tied, another head": ("llama, tied", [head()], "the LM head is lm_head.weight, which differs from"),
    "tied, another head in another dtype": ("llama, tied", [head(dtype=torch.float16)], "the LM head is lm_head.w"),
    "tied by default, another head": ("gemma2", [without("tie_word_embeddings"), head()], "the LM head is lm_head"),
    "gpt2, another head": ("gpt2", [head()], "which differs from transformer.wte.weight"),
    "gpt_neox, tied, another head": ("gpt_neox", [config(tie_word_embeddings=True)], "the LM head is embed_out.weight"),
    "tied, the same head": (
        "llama, tied", [same_head("lm_head.weight", "model.embed_tokens.weight")],
        "ignored 'lm_head.weight': the LM head equals the embedding",
    ),
    "not tied, the same head": ("llama", [same_head("lm_head.weight", "model.embed_tokens.weight")], ""),
    "tied, only the head": (
        "llama, tied", [only_head("lm_head.weight", "model.embed_tokens.weight")], "have lm_head.weight, but no embed",
    ),
    "gpt2, only the head": ("gpt2", [only_head("lm_head.weight", "transformer.wte.weight")], "but no embedding"),
    "gemma3, neither key": (
        "gemma3", [without("tie_word_embeddings"), without("tie_word_embeddings", part="text_config")], "images are",
    ),
    "gemma3, another head": ("gemma3", [head("language_model.lm_head.weight")], "the LM head is language_model.lm_h"),
    "gemma3, outer false, another head": (
        "gemma3", [config(tie_word_embeddings=False), head("lm_head.weight")], "the LM head is lm_head.weight",
    ),
    "gemma3, inner false": ("gemma3", [text_config(tie_word_embeddings=False)], "images are not served"),
    "gemma3, only the head": ("gemma3", [only_head("lm_head.weight", EMBEDDING)], "have lm_head.weight, but no emb"),
    "mistral3 as transformers 5 writes it": ("mistral3", [], "images are not served"),
    "mistral3 as on the hub": (
        "mistral3", [without("tie_word_embeddings"), head("language_model.lm_head.weight")], "the LM head is language_",
    ),
    "mistral3, both false, another head": (
        "mistral3", [config(tie_word_embeddings=False), head("lm_head.weight")], "images are not served",
    ),
    "idefics3": ("idefics3", [], "images are not served"),
    "idefics3 without model.": (
        "idefics3", [lambda folder: folder.rename(lambda name: name.removeprefix("model."))], "images are not served",
    ),
    **{name: (name, [], "images are not served") for name in forms.QWEN_VL},
    "qwen2_vl as on the hub": ("qwen2_vl", [flat, as_on_the_hub], "images are not served"),
    "qwen2_5_vl as on the hub": ("qwen2_5_vl", [flat, as_on_the_hub], "images are not served"),
    "qwen2_vl without its head": ("qwen2_vl", [renames(model__="language_model.")], "images are not served"),
    "qwen2_5_vl in memory": (
        "qwen2_5_vl", [renames(model__="model.language_model.", visual="model.visual")], "images are not served",
    ),
    "mistral3, the same head": ("mistral3", [same_head("lm_head.weight", EMBEDDING)], "the LM head equals the embed"),
}  # fmt: skip
"""The model, what is done to its folder, and what its notes say."""

NAMES: dict[str, tuple[str, list[Change], str]] = {
    "without model.": ("qwen2, tied", [renames(model__=""), config(architectures=["Qwen2Model"])], ""),
    "without model., another head": ("llama", [renames(model__="")], ""),
    "embedding without model.": ("llama", [renames(model__embed_tokens="embed_tokens")], ""),
    "model. twice": ("llama", [renames(model__="model.model.", lm_head="model.lm_head")], ""),
    "gpt2 as on the hub": ("gpt2", [renames(transformer__=""), add(**MASKS)], "causal masks are computed"),
    "gpt_neox, lm_head": ("gpt_neox", [renames(embed_out="lm_head"), add(**NEOX_MASKS)], "causal masks"),
    "gpt_neox without gpt_neox.": ("gpt_neox", [renames(gpt_neox__="")], ""),
    "opt as on the hub": ("opt", [renames(model__decoder__="decoder.")], ""),
    "bloom as on the hub": ("bloom", [renames(transformer__="")], ""),
    "gemma3 in memory": (
        "gemma3",
        [renames(language_model__model__="model.language_model.", vision="model.vision", multi="model.multi")],
        "ignored 'model.multi_modal_projector.",
    ),
    "gemma3 without its head": ("gemma3", [renames(language_model__model__="language_model.")], "images are"),
    "ministral3 in memory, another head": (
        "ministral3", [renames(language_model__model__="model.language_model."), head()], "the LM head is lm_head.w",
    ),
    "gemma3, both": ("gemma3", [renames(language_model__model__="model.language_model.model.")], "images are"),
    "experts without model.": ("qwen3_moe", [renames(model__="")], ""),
    "old buffers": ("llama", [add(**BUFFERS)], "and 1 more: rotary frequencies are computed"),
}  # fmt: skip

FILES: dict[str, tuple[str, list[Change], str]] = {
    "shards": ("llama", [sharded], ""),
    "gemma3, shards": ("gemma3", [sharded], "images are not served"),
    "a tensor in two shards": ("llama", [twice(lambda value: value)], "with the same values"),
    "two tensors in two shards": (
        "llama",
        [twice(lambda value: value + 1)],
        "'model-00002-of-00002.safetensors' counts",
    ),
    "a stale index": ("llama", [stale_index], ""),
    "other shards": ("llama", [other_shards], ""),
}

CONFIGS: dict[str, tuple[str, list[Change], str]] = {
    "old rope keys": ("llama", [without("rope_parameters"), config(rope_theta=7000.0, rope_scaling=None)], ""),
    "old scaling": (
        "llama", [without("rope_parameters"), config(rope_theta=7e3, rope_scaling={"type": "linear", "factor": 4})],
        "the context is 1024 tokens, although max_position_embeddings is 256: linear scaling",
    ),
    "YaRN beside the old length": (
        "llama", [config(rope_parameters=None, rope_theta=7e3, rope_scaling=YARN, max_position_embeddings=128)],
        "the context is 256 tokens, although max_position_embeddings is 128: YaRN scales 64 positions by 4",
    ),
    "no key of a default": ("llama", [without("head_dim", "attention_bias", "mlp_bias", "pretraining_tp")], ""),
    "architectures of a base model": ("llama, tied", [config(architectures=["LlamaModel"])], ""),
    "no architectures": ("llama", [config(architectures=None)], ""),
    "torch_dtype": ("llama", [without("dtype"), config(torch_dtype="float16")], ""),
}  # fmt: skip

ALL = {**HEADS, **NAMES, **FILES, **CONFIGS}
LIKE_OTHERS = (
    *("tied, another head in another dtype", "gpt2, another head", "gpt2, only the head", "not tied, the same head"),
    *("gemma3, neither key", "gemma3, outer false, another head", "gemma3, inner false", "mistral3, the same head"),
    *("mistral3, both false, another head", "without model., another head", "model. twice", "gpt_neox, lm_head"),
    *("bloom as on the hub", "gemma3 without its head", "gemma3, both", "gemma3, shards", "other shards"),
    *("no key of a default", "no architectures", "torch_dtype", "tied by default, another head"),
)
"""Forms that take the same path as another one: `make test` leaves them out."""
FORMS = [form for form in ALL if os.environ.get("PIPELINE_ALL_CASES") or form not in LIKE_OTHERS]


@pytest.mark.parametrize("form", FORMS)
def test_a_folder_has_the_logits_of_transformers(tmp_path: Path, form: str) -> None:
    name, changes, note = ALL[form]
    source = forms.write(tmp_path / "tiny", name, *changes)
    with torch.inference_mode():
        theirs = forms.reference(source)(torch.tensor([IDS])).logits[0, -1].numpy()
    folder = prepared(source)
    assert theirs.std() > 1000 * MAX_ERROR
    np.testing.assert_allclose(logits_of(folder), theirs, rtol=0, atol=MAX_ERROR)
    # The tokenizer is the same in all folders, and so not always that of the model's class.
    notes = "\n".join(line for line in notes_of(folder) if not line.startswith("tokenizer.json has another "))
    assert note in notes if note else not notes


def test_keys_of_the_config_may_be_overridden(tmp_path: Path) -> None:
    """As vLLM's --hf-overrides: the folder stays as it is, and the model is that of the other config.json."""
    yarn = {"rope_scaling": {**YARN, "rope_theta": 7000.0}, "max_position_embeddings": 128}
    source = forms.write(tmp_path / "tiny", "llama")
    edited = forms.write(tmp_path / "edited", "llama", config(**yarn))
    both = Settings(cache_dir=str(tmp_path / "cache"))
    plain, overridden, same = (
        prepare(msgspec.structs.replace(both, model=str(path), hf_overrides=text))
        for path, text in ((source, ""), (source, json.dumps(yarn)), (edited, ""))
    )
    configs = [ModelConfig.load(folder) for folder in (plain, overridden, same)]
    assert [one.max_position for one in configs] == [256, 256, 256]
    assert configs[1].rope_scaling == configs[2].rope_scaling != configs[0].rope_scaling
    assert notes_of(overridden) == ["hf_overrides replaces 'rope_scaling', 'max_position_embeddings'", *notes_of(same)]
    np.testing.assert_array_equal(logits_of(overridden), logits_of(same))


def test_what_generation_config_says_and_the_server_does_not_do_is_named(tmp_path: Path) -> None:
    source = forms.write(tmp_path / "tiny", "llama")
    path = source / "generation_config.json"
    plain = {"eos_token_id": [2, 5], "temperature": 0.7, "do_sample": True, "repetition_penalty": 1.1, "num_beams": 1}
    path.write_text(json.dumps(plain))
    assert notes_of(prepared(source)) == []
    unused = {
        "forced_eos_token_id": 7,
        "early_stopping": True,
        "stop_strings": ["END"],
        "min_length": 0,
        "new": "x",
    }
    path.write_text(json.dumps({**plain, **unused, "eos_token_id": 5}))
    folder = prepared(source)
    assert notes_of(folder) == [
        "generation_config.json: 'forced_eos_token_id', 'early_stopping', 'stop_strings', 'new' are not used",
        "replies also end at the ids [2] of config.json or the tokenizer, which eos_token_id of generation_config.json "
        "does not name",
    ]
    assert ModelConfig.load(folder).eos_ids == [2, 5]


def test_overrides_of_a_text_config_are_merged(tmp_path: Path) -> None:
    source = forms.write(tmp_path / "tiny", "mistral3")
    overrides = json.dumps({"text_config": {"sliding_window": 8}})
    settings = Settings(model=str(source), cache_dir=str(tmp_path / "cache"), hf_overrides=overrides)
    changed, plain = ModelConfig.load(prepare(settings)), ModelConfig.load(prepared(source))
    assert (plain.sliding_window, changed.sliding_window) == (4096, 8)
    assert msgspec.structs.replace(changed, sliding_window=4096) == plain


def test_a_gguf_file_has_no_keys_to_override(tmp_path: Path) -> None:
    path = checkpoints.save_gguf(tmp_path / "a.gguf", checkpoints.tiny_llama())
    with pytest.raises(ModelError, match=r"hf_overrides: a\.gguf has no config\.json"):
        prepare(Settings(model=str(path), cache_dir=str(tmp_path / "cache"), hf_overrides="{}"))


def test_longrope_has_the_short_context_unless_another_is_set(tmp_path: Path) -> None:
    """As in vLLM. Prompts of that length have transformers' results."""
    source = forms.write(tmp_path / "tiny", "phi3, LongRoPE")
    folder = prepared(source)
    config = ModelConfig.load(folder)
    assert [config.longest_sequence(number) for number in (0, 100, 128, 300, 1000)] == [128, 100, 128, 300, 512]
    with torch.inference_mode():
        theirs = forms.reference(source)(torch.tensor([IDS])).logits[0, -1].numpy()
    np.testing.assert_allclose(logits_of(folder), theirs, rtol=0, atol=MAX_ERROR)
    short, long = longrope_line(config, 0), longrope_line(config, 300)
    assert short is not None and short.startswith("LongRoPE for up to 128 tokens") and "max_model_len=512 for" in short
    assert long is not None and "up to 300 tokens: all sequences use the factors for long contexts" in long
    assert "set max_model_len=128" in long
    unscaled = msgspec.structs.replace(config, rope_scaling=None)
    assert unscaled.longest_sequence(0) == 512 and longrope_line(unscaled, 0) is None


REFUSED: dict[str, tuple[str, list[Change], str]] = {
    "no head": (
        "llama", [renames(lm_head="head")],
        "no tensor 'lm_head.weight', which config.json requires because tie_word_embeddings is false",
    ),
    "an unknown tensor": ("llama", [add(model__extra=torch.ones(1))], "'model.extra' is not part of the model"),
    "a bias": ("llama", [add(model__layers__0__mlp__up_proj__bias=torch.ones(96))], "'model.layers.0.mlp.up_proj.bi"),
    "a bias with the name of a mask": (
        "llama", [add(model__layers__0__attn__bias=torch.ones(96))], "'model.layers.0.attn.bias' is not part",
    ),
    "a vision tower in a text model": ("llama", [add(vision_tower__w=torch.ones(1))], "'vision_tower.w' is not part"),
    "two heads": (
        "gemma3", [head("lm_head.weight"), head("language_model.lm_head.weight")], "lm_head.weight' is not part",
    ),
    "a scale of activations without quantization": (
        "llama", [add(model__layers__0__self_attn__k_scale=torch.ones(1))], "k_scale' is not part of the model",
    ),
    "another file of weights": ("llama", [config(transformers_weights="other.safetensors")], "transformers_weights is"),
    "a text config that is null": ("gemma3", [config(text_config=None)], "text_config is None; it must be the object"),
}  # fmt: skip


@pytest.mark.parametrize("form", REFUSED)
def test_other_folders_are_refused_by_name(tmp_path: Path, form: str) -> None:
    name, changes, words = REFUSED[form]
    source = forms.write(tmp_path / "tiny", name, *changes)
    with pytest.raises(ModelError) as raised:
        prepared(source)
    assert words in str(raised.value) and "\n" not in str(raised.value)
