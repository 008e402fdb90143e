"""What sentence-transformers' files say of a model is what the server computes; what they must not say is refused."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pipeline.config.settings import Settings
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.pooler import HEAD_FILE, Pooler
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.stage import prepare
from tests.stages.execute.driver import settings
from tests.stages.execute.encoders.tiny_encoders import Texts, random_ids
from tests.stages.prepare import checkpoints

PACKAGE = "sentence_transformers.models."
MEAN = {"word_embedding_dimension": 64, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
LAST = {"embedding_dimension": 64, "pooling_mode": "lasttoken", "include_prompt": True}
MAX_ERROR = 1e-4


def write(folder: Path, name: str, content: Any) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def add_modules(folder: Path, *names: str, **configs: Mapping[str, Any]) -> None:
    """Write modules.json with Transformer and these modules, and the configurations of some, by name."""
    paths = ["", *(f"{i}_{name}" for i, name in enumerate(names, 1))]
    types = ["Transformer", *names]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"{PACKAGE}{kind}"}
        for i, (path, kind) in enumerate(zip(paths, types, strict=True))
    ]
    write(folder, "modules.json", modules)
    for path, name in zip(paths[1:], names, strict=True):
        if name in configs:
            write(folder, f"{path}/config.json", configs[name])


def add_dense(folder: Path, path: str, inputs: int, outputs: int, seed: int, **config: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    tensors = {"linear.weight": torch.randn(outputs, inputs) * 0.2, "linear.bias": torch.randn(outputs)}
    if not config.get("bias", True):
        del tensors["linear.bias"]
    write(folder, f"{path}/config.json", {"in_features": inputs, "out_features": outputs, "bias": True, **config})
    save_file(tensors, folder / path / "model.safetensors")
    return tensors


@pytest.fixture
def model() -> Any:
    return checkpoints.tiny("qwen3", head_dim=16)


@pytest.fixture
def source(tmp_path: Path, model: Any) -> Path:
    return checkpoints.save_folder(tmp_path / "source", model)


def prepared(source: Path, **changes: Any) -> Path:
    return prepare(Settings(model=str(source), cache_dir=str(source.parent / "cache"), **changes))


def pooler_of(source: Path) -> Pooler:
    pooler = ModelConfig.load(prepared(source)).pooler
    assert pooler is not None
    return pooler


def states_of(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        states: torch.Tensor = model.model(torch.tensor([ids])).last_hidden_state[0]
    return states


def test_a_decoder_with_a_pooling_module_makes_embeddings_and_has_no_head(source: Path, model: Any) -> None:
    generating = ModelConfig.load(prepared(source))
    assert generating.generates and generating.tasks == ("generate", "embed")
    add_modules(source, "Pooling", "Normalize", Pooling=LAST)
    write(source, "sentence_bert_config.json", {"max_seq_length": 40, "do_lower_case": False})
    prompts = {"query": "Query: ", "document": ""}
    write(source, "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": "query"})
    folder = prepared(source)
    config = ModelConfig.load(folder)
    assert not config.generates and config.tasks == ("embed", "token_embed")
    assert config.pooler == Pooler(pooling="last", width=64, prompts=prompts, default_prompt="query", max_seq_length=40)
    ids = random_ids(23, 1)
    (vector,) = Texts(folder, settings(kernels="torch", kv_mib=2)).compute([ids])
    np.testing.assert_allclose(vector, states_of(model, ids)[-1].numpy(), rtol=0, atol=MAX_ERROR)


@pytest.mark.parametrize("activation", ["torch.nn.modules.linear.Identity", "torch.nn.modules.activation.GELU"])
def test_dense_modules_follow_the_pooling(source: Path, model: Any, activation: str) -> None:
    """Two without an activation between them are one matrix."""
    add_modules(source, "Pooling", "Dense", "Dense", "Normalize", Pooling=MEAN)
    first = add_dense(source, "2_Dense", 64, 256, 1, activation_function=activation)
    second = add_dense(source, "3_Dense", 256, 24, 2, activation_function="torch.nn.modules.activation.Tanh")
    folder = prepared(source)
    pooler = ModelConfig.load(folder).pooler
    assert pooler is not None and pooler.width == 24
    assert [layer.num_outputs for layer in pooler.layers] == ([24] if "Identity" in activation else [256, 24])
    ids = random_ids(31, 2)
    (vector,) = Texts(folder, settings(kernels="torch", kv_mib=2)).compute([ids])
    x = states_of(model, ids).mean(0) @ first["linear.weight"].T + first["linear.bias"]
    x = torch.nn.functional.gelu(x) if "GELU" in activation else x
    expected = torch.tanh(x @ second["linear.weight"].T + second["linear.bias"])
    np.testing.assert_allclose(vector, expected.numpy(), rtol=0, atol=MAX_ERROR)


@pytest.mark.parametrize("by", ["module", "hf_overrides"])
def test_a_reranker_scores_by_the_logits_of_two_tokens(source: Path, model: Any, by: str) -> None:
    tokenizer = checkpoints.byte_level()
    true_id, false_id = (tokenizer.token_to_id(token) for token in "yn")
    if by == "module":
        ids_of = {"true_token_id": true_id, "false_token_id": false_id}
        add_modules(source, "LogitScore", LogitScore=ids_of)
        folder = prepared(source)
    else:
        named = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["n", "y"]}
        folder = prepared(source, hf_overrides=json.dumps(named))
    config = ModelConfig.load(folder)
    assert config.tasks == ("classify", "score") and config.pooler is not None
    assert config.pooler.classifier is not None and config.pooler.classifier.activation == "sigmoid"
    ids = random_ids(29, 3)
    (score,) = Texts(folder, settings(kernels="torch", kv_mib=2)).compute([ids])
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, -1]
    np.testing.assert_allclose(score, [float(logits[true_id] - logits[false_id])], rtol=0, atol=MAX_ERROR)


def test_a_changed_module_is_prepared_anew(source: Path) -> None:
    add_modules(source, "Pooling", Pooling=MEAN)
    assert pooler_of(source).pooling == "mean"
    write(source, "1_Pooling/config.json", LAST)
    assert pooler_of(source).pooling == "last"


def _without_safetensors(folder: Path) -> None:
    (folder / "2_Dense/model.safetensors").rename(folder / "2_Dense/pytorch_model.bin")


def _wrong_sizes(folder: Path) -> None:
    write(folder, "2_Dense/config.json", {"in_features": 64, "out_features": 9, "bias": False})


def _other_inputs(folder: Path) -> None:
    add_dense(folder, "2_Dense", 63, 8, 0)


def _not_finite(folder: Path) -> None:
    save_file({"linear.weight": torch.full((8, 64), torch.nan)}, folder / "2_Dense/model.safetensors")
    write(folder, "2_Dense/config.json", {"in_features": 64, "out_features": 8, "bias": False})


def _changed(name: str, content: Any) -> Callable[[Path], None]:
    return lambda folder: write(folder, name, content)


def _modules(*changes: Any) -> Callable[[Path], None]:
    return _changed("modules.json", [{"type": f"{PACKAGE}Transformer", "path": ""}, *changes])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_modules({"type": f"{PACKAGE}CNN", "path": "1_CNN"}), r"modules\.json: the module '.*CNN' is not supported"),
        (_modules({"type": f"{PACKAGE}Pooling", "path": "../x"}), r"'\.\./x/config\.json' is not the name of a file"),
        (_modules({"type": f"{PACKAGE}Pooling", "path": "9_P"}), r"9_P/config\.json is missing, which modules\.json"),
        (_modules({"type": f"{PACKAGE}Transformer", "path": "0_T"}), r"path of module Transformer is '0_T'"),
        (_modules(*[{"type": f"{PACKAGE}Normalize"}] * 99), r"modules\.json has 100 modules"),
        (_changed("modules.json", {"a": 1}), r"modules\.json is not a JSON object"),
        (_changed("1_Pooling/config.json", {}), r"1_Pooling/config\.json: pooling_mode is \[\]; exactly one"),
        (_changed("1_Pooling/config.json", {**MEAN, "pooling_mode_cls_token": True}), r"pooling_mode is \['cls', 'm"),
        (_changed("1_Pooling/config.json", {"pooling_mode": "middle"}), r"pooling_mode is 'middle'; supported are cls"),
        (_changed("1_Pooling/config.json", {**MEAN, "include_prompt": False}), r"include_prompt is false"),
        (_changed("2_Dense/config.json", {"in_features": -1, "out_features": 8}), r"in_features is -1"),
        (
            _changed("2_Dense/config.json", {"in_features": 64, "out_features": 8, "activation_function": "a.Mish"}),
            r"2_Dense/config\.json: activation_function is 'a\.Mish'",
        ),
        (_without_safetensors, r"2_Dense/model\.safetensors is missing: only safetensors"),
        (_wrong_sizes, r"2_Dense/model\.safetensors: tensor 'linear\.weight' has shape \(8, 64\)"),
        (_other_inputs, r"layer 0 after the pooling has 63 inputs, not 64"),
        (_not_finite, r"layer 0 after the pooling has values that are not finite"),
        (
            _changed("config_sentence_transformers.json", {"prompts": {"a": "b"}, "default_prompt_name": "c"}),
            r"default_prompt_name is 'c', which prompts does not have",
        ),
        (
            _changed("config_sentence_transformers.json", {"prompts": {"a": "b" * 20_000}}),
            r"prompts has 1 texts; at mo",
        ),
        (_changed("sentence_bert_config.json", {"max_seq_length": 0}), r"max_seq_length is 0"),
        (_changed("sentence_bert_config.json", {"do_lower_case": True}), r"do_lower_case is true"),
    ],
)
def test_what_a_file_must_not_say_is_refused_with_its_name(
    source: Path, change: Callable[[Path], None], words: str
) -> None:
    add_modules(source, "Pooling", "Dense", Pooling=MEAN)
    add_dense(source, "2_Dense", 64, 8, 0)
    change(source)
    with pytest.raises(ModelError, match=words):
        prepared(source)


def test_layers_are_kept_beside_the_model(source: Path) -> None:
    add_modules(source, "Pooling", "Dense", Pooling=MEAN)
    tensors = add_dense(source, "2_Dense", 64, 8, 0, bias=False, activation_function="x.Identity")
    assert (prepared(source) / HEAD_FILE).stat().st_size > tensors["linear.weight"].nbytes


@pytest.mark.parametrize(
    ("changes", "labels", "activation"),
    [
        ({}, ["LABEL_0", "LABEL_1"], "softmax"),
        ({"id2label": {"0": "no"}}, ["no"], "sigmoid"),
        ({"id2label": {"1": "b", "0": "a"}, "problem_type": "multi_label_classification"}, ["a", "b"], "sigmoid"),
        ({"id2label": {"0": "x"}, "problem_type": "regression"}, ["x"], "identity"),
        (
            {"id2label": {"0": "x"}, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            ["x"],
            "identity",
        ),
    ],
)
def test_labels_and_their_activation_are_those_of_the_config(
    tmp_path: Path, changes: dict[str, Any], labels: list[str], activation: str
) -> None:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("bert", vocab_size=608, num_labels=len(labels), **sizes)
    made = AutoModelForSequenceClassification.from_config(config)
    source = checkpoints.save_folder(
        tmp_path / "source", made, tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast"}
    )
    checkpoints.edit_config(source, id2label=None, label2id=None)
    checkpoints.edit_config(source, **changes)
    found = pooler_of(source).classifier
    assert found is not None and (found.labels, found.activation) == (labels, activation)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"id2label": {"1": "b", "2": "c"}}, r"config\.json: id2label has None for 0"),
        ({"id2label": {"0": 7}}, r"id2label has 7 for 0"),
        ({"id2label": []}, r"id2label is \[\]"),
        ({"problem_type": "poetry"}, r"problem_type is 'poetry'; supported are regression"),
        ({"id2label": {str(i): "x" for i in range(3)}}, r"tensor 'classifier\.weight' has shape \(2, 32\)"),
        ({"sentence_transformers": {"activation_fn": "a.b.Mish"}}, r"activation_fn is 'a\.b\.Mish'"),
        ({"matryoshka_dimensions": [3, 99]}, r"matryoshka_dimensions is \[3, 99\]"),
    ],
)
def test_wrong_labels_are_refused_with_the_key(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("bert", vocab_size=608, **sizes))
    source = checkpoints.save_folder(
        tmp_path / "source", made, tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast"}
    )
    checkpoints.edit_config(source, **changes)
    with pytest.raises(ModelError, match=words):
        prepared(source)


def test_wrong_dimensions_of_an_embedding_model_are_refused_with_the_key(source: Path) -> None:
    add_modules(source, "Pooling", Pooling=LAST)
    checkpoints.edit_config(source, matryoshka_dimensions=[8, 10**400])
    with pytest.raises(ModelError, match=r"config\.json: matryoshka_dimensions is \[8, 1000"):
        prepared(source)
