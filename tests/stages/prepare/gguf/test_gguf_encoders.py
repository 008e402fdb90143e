"""A .gguf file of an encoder, an embedder or a reranker has the results of its original model.

The files are made as llama.cpp's converter makes them, see architectures.py.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pipeline.config.settings import Settings
from pipeline.runtime.messages import Pooling, TextPrompt
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.ingest.templates import pair_template
from pipeline.stages.prepare.encoders.pair_templates import RERANK_KEY
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.stage import prepare
from tests.stages.execute.driver import settings
from tests.stages.execute.encoders import tiny_encoders
from tests.stages.execute.encoders.test_rerankers import DEFAULT, PREFIX, SUFFIX
from tests.stages.execute.encoders.tiny_encoders import Texts, Variant, random_ids
from tests.stages.prepare.gguf.architectures import A, Case, norms_plus_one, plain, save

MAX_ERROR = 1e-4
GEMMA = tiny_encoders.VARIANTS["gemma3, bidirectional"].changes
CLASSIFIER = "classifier.output_labels"


@dataclass(frozen=True)
class Encoder:
    variant: Variant
    arch: Any
    metadata: Mapping[str, Any] = field(default_factory=dict)
    pooling: Pooling = Pooling.MEAN
    tasks: tuple[str, ...] = ("embed", "token_embed")


CAUSAL = {"attention.causal": False}
XLM = {"pad_token_id": 1, "type_vocab_size": 1}
ENCODERS = {
    "bert": Encoder(Variant("bert"), A.BERT, {**CAUSAL, "pooling_type": 1}),
    "bert, cls": Encoder(Variant("bert"), A.BERT, {**CAUSAL, "pooling_type": 2}, Pooling.CLS),
    "xlm-roberta, no pooling": Encoder(Variant("xlm-roberta", XLM), A.BERT, {**CAUSAL, "pooling_type": 0}),
    "reranker": Encoder(
        Variant("xlm-roberta", {**XLM, "num_labels": 1}, head="sequence"),
        A.BERT,
        {**CAUSAL, "pooling_type": 4},
        Pooling.CLS,
        ("classify", "score"),
    ),
    "classifier": Encoder(
        Variant("xlm-roberta", {**XLM, "num_labels": 3}, head="sequence"),
        A.BERT,
        {**CAUSAL, "pooling_type": 4, CLASSIFIER: ["a", "b", "c"]},
        Pooling.CLS,
        ("classify",),
    ),
    "nomic-bert": Encoder(Variant("nomic_bert"), A.NOMIC_BERT, {**CAUSAL, "pooling_type": 1}),
    "gemma-embedding": Encoder(
        Variant("gemma3_text", {**GEMMA, "query_pre_attn_scalar": 32, "layer_types": None}),
        A.GEMMA_EMBEDDING,
        {"attention.sliding_window": 21, "pooling_type": 1},
    ),
    "qwen3": Encoder(
        Variant("qwen3", {"head_dim": 32, "num_key_value_heads": 2}), A.QWEN3, {"pooling_type": 3}, Pooling.LAST
    ),
}


def tensors_of(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Those that the converter writes, by the names that gguf-py knows: without position ids, unused heads, and the
    rows of positions before the first one."""
    model.save_pretrained(folder)
    kind, found = model.config.model_type, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        short = name.removeprefix("roberta.")
        short = f"model.{short}" if kind in ("gemma3_text", "qwen3") else short
        if short.startswith("pooler."):
            continue
        if kind == "xlm-roberta" and "position_embeddings" in short:
            tensor = tensor[2:]
        found[short] = tensor
    return found


def written(folder: Path, encoder: Encoder, **more: np.ndarray) -> tuple[Path, Any]:
    """The file of a model, and the model, with matrices in bfloat16 as they are kept. `more` are further tensors."""
    model = tiny_encoders.make(encoder.variant)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and not name.startswith("classifier"):
                parameter.copy_(parameter.bfloat16())
    tensors = tensors_of(model, folder / "source")
    tensors |= {f"{name}.weight": torch.from_numpy(array) for name, array in more.items()}
    source: Any = SimpleNamespace(config=model.config, state_dict=lambda: tensors)
    convert = norms_plus_one if encoder.arch == A.GEMMA_EMBEDDING else plain
    metadata = dict(encoder.metadata)
    if encoder.variant.kind == "xlm-roberta":
        metadata["context_length"] = 126
    return save(folder / "tiny.gguf", source, Case("", encoder.arch, metadata, convert)), model


def reference(model: Any, variant: Variant, ids: list[int], pooling: Pooling) -> np.ndarray:
    with torch.inference_mode():
        out = model(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long))
    if variant.head:
        logits: np.ndarray = out.logits[0].numpy()
        return logits
    states = out.last_hidden_state[0]
    found = {Pooling.MEAN: states.mean(0), Pooling.CLS: states[0], Pooling.LAST: states[-1]}[pooling]
    vector: np.ndarray = found.numpy()
    return vector


@pytest.mark.parametrize("name", ENCODERS)
def test_a_file_has_the_results_of_its_original_model(tmp_path: Path, name: str) -> None:
    encoder = ENCODERS[name]
    path, model = written(tmp_path, encoder)
    folder = prepare(Settings(model=str(path), cache_dir=str(tmp_path / "cache")))
    config = ModelConfig.load(folder)
    assert config.architecture == ("bert" if encoder.arch == A.BERT else encoder.variant.kind)
    assert config.tasks == encoder.tasks
    texts = [random_ids(num, num) for num in (70, 5, 126)]
    for ids, ours in zip(
        texts, Texts(folder, settings(kernels="torch", kv_mib=2, tokens=256)).compute(texts), strict=True
    ):
        theirs = reference(model, encoder.variant, ids, encoder.pooling)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=MAX_ERROR)


def test_dense_layers_of_embedding_gemma_follow_the_pooling(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    first, second = random.normal(0, 0.1, (96, 64)).astype("f4"), random.normal(0, 0.1, (64, 96)).astype("f4")
    encoder = ENCODERS["gemma-embedding"]
    path, model = written(tmp_path, encoder, dense_2_out=first, dense_3_out=second)
    folder = prepare(Settings(model=str(path), cache_dir=str(tmp_path / "cache")))
    ids = random_ids(40, 4)
    (ours,) = Texts(folder, settings(kernels="torch", kv_mib=2)).compute([ids])
    theirs = second @ (first @ reference(model, encoder.variant, ids, Pooling.MEAN))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=MAX_ERROR)


RERANK = "a {{ b <q>{query}</q>\n{document}'\"{% c"
QWEN3 = f"{PREFIX}<Instruct>: {DEFAULT}\n<Query>: {{query}}\n<Document>: {{document}}{SUFFIX}"
"""As llama.cpp's converter writes it."""


@pytest.mark.parametrize(
    ("rerank", "instruction", "expected"),
    [
        (None, None, QWEN3),
        (QWEN3, None, QWEN3),
        (QWEN3, "Find it.", QWEN3.replace(DEFAULT, "Find it.")),
        (RERANK, None, RERANK),
    ],
)
def test_a_reranker_has_the_template_of_its_file(
    tmp_path: Path, rerank: str | None, instruction: str | None, expected: str
) -> None:
    metadata: dict[str, Any] = {"pooling_type": 4, CLASSIFIER: ["yes", "no"]}
    metadata |= {} if rerank is None else {RERANK_KEY: rerank}
    encoder = Encoder(ENCODERS["qwen3"].variant, A.QWEN3, metadata)
    random = np.random.default_rng(0).normal(0, 0.1, (2, 64)).astype("f4")
    path, model = written(tmp_path, encoder, **{"cls.output": random})
    folder = prepare(Settings(model=str(path), cache_dir=str(tmp_path / "cache")))
    config = ModelConfig.load(folder)
    assert config.tasks == ("classify", "score")
    template = pair_template.load(folder, config.pooler, {}, 1.0)
    assert template is not None
    prompt = TextPrompt("the query", "{query}", json.dumps({"instruction": instruction} if instruction else {}))
    text = template.render(prompt, max_chars=10_000, is_short=True).text
    assert text == expected.replace("{query}", "the query").replace("{document}", "{query}")
    ids = random_ids(40, 4)
    (ours,) = Texts(folder, settings(kernels="torch", kv_mib=2)).compute([ids])
    theirs = reference(model, encoder.variant, ids, Pooling.LAST) @ (random[0] - random[1])
    np.testing.assert_allclose(ours, [theirs], rtol=0, atol=MAX_ERROR)


@pytest.mark.parametrize(
    ("name", "metadata", "more", "words"),
    [
        ("bert", {"pooling_type": 9}, {}, r"bert\.pooling_type is 9; supported are 0 \(none\), 1 \(mean\)"),
        ("bert", {"pooling_type": 4}, {}, r"the tensor cls\.output\.weight is missing"),
        ("bert", {"attention.causal": True}, {}, r"bert\.attention\.causal is True"),
        ("qwen3", {"attention.causal": False}, {}, r"qwen3\.attention\.causal is False"),
        ("classifier", {CLASSIFIER: ["a", "b"]}, {}, r"classifier\.output_labels has 2 labels; there are 3 logits"),
        (
            "gemma-embedding",
            {},
            {"dense_2_out": np.ones((8, 60), np.float32)},
            r"tensor dense_2\.weight has shape \(8, 60\); it must have 64 columns",
        ),
        (
            "gemma-embedding",
            {},
            {"dense_2_out": np.full((8, 64), np.inf, np.float32)},
            r"0\.weight after the pooling has values that are not finite",
        ),
    ],
)
def test_what_a_file_must_not_say_is_refused_with_its_key(
    tmp_path: Path, name: str, metadata: dict[str, Any], more: dict[str, np.ndarray], words: str
) -> None:
    encoder = ENCODERS[name]
    changed = Encoder(encoder.variant, encoder.arch, {**encoder.metadata, **metadata})
    path, _ = written(tmp_path, changed, **more)
    with pytest.raises(ModelError, match=words):
        prepare(Settings(model=str(path), cache_dir=str(tmp_path / "cache")))
