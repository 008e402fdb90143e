"""Encoders in .gguf files, and what files say of embeddings and rerankers (`pooling_type`).

Names and rules are those of llama.cpp: `conversion/bert.py` and `conversion/gemma.py`, `src/models/bert.cpp`, and
`build_pooling` in `src/llama-graph.cpp`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.pooler import Classifier, HeadActivation, HeadLayer, Pooler, PoolingKind
from pipeline.stages.prepare.encoders.bert import BERT
from pipeline.stages.prepare.encoders.nomic import GATED
from pipeline.stages.prepare.encoders.pooler import MAX_LABEL_CHARS, MAX_LABELS, PreparedPooler
from pipeline.stages.prepare.encoders.sentence_transformers import FloatArray
from pipeline.stages.prepare.gguf.architecture import LAYER_EPS, GgufArchitecture, GgufKeys
from pipeline.stages.prepare.gguf.file import GgufTensor
from pipeline.stages.prepare.gguf.metadata import Metadata
from pipeline.stages.prepare.sources.source import ModelError

POOLINGS: dict[int, PoolingKind] = {1: "mean", 2: "cls", 3: "last"}
"""`enum llama_pooling_type`"""
NONE, RANK = 0, 4
FIRST, SECOND = ("cls.weight", "cls.bias"), ("cls.output.weight", "cls.output.bias")
"""Matrix and bias of the head of a reranker: with a tanh after it, and of the logits."""
DENSE = ("dense_2.weight", "dense_3.weight")


def _positions(keys: GgufKeys, model: ModelConfig) -> dict[str, Any]:
    """The converter leaves out the rows before the first position."""
    found = keys.tensors.get("position_embd.weight")
    if found is None:
        raise ModelError(f"{keys.metadata.path}: the tensor position_embd.weight is missing")
    rows = int(found.shape[0])
    return {**_types(keys, model), "position_embeddings": rows, "max_position": min(rows, model.max_position)}


def _types(keys: GgufKeys, model: ModelConfig) -> dict[str, Any]:
    types = keys.tensors.get("token_types.weight")
    return {"token_types": 0 if types is None else int(types.shape[0]) if len(types.shape) > 1 else 1}


def _nomic(keys: GgufKeys, model: ModelConfig) -> dict[str, Any]:
    keys.metadata.refuse_unless(f"{keys.architecture}.moe_every_n_layers", 0, "a mixture of experts")
    return _types(keys, model)


ARCHITECTURES: dict[str, GgufArchitecture] = {
    "bert": GgufArchitecture(models="BERT", eps=LAYER_EPS, always={**BERT, "activation": "gelu"}, read=_positions),
    "nomic-bert": GgufArchitecture(
        models="Nomic Embed",
        model_type="nomic_bert",
        eps=LAYER_EPS,
        always={**GATED, "qkv_bias": False, "out_bias": False, "mlp_bias": False},
        read=_nomic,
    ),
}


def labels_of(metadata: Metadata, architecture: str) -> list[str] | None:
    """The names of a reranker's or classifier's labels, if the file has them."""
    return metadata.list_of(f"{architecture}.classifier.output_labels", str)


def pooler_of(
    metadata: Metadata,
    architecture: str,
    config: ModelConfig,
    tensors: dict[str, GgufTensor],
    floats: Callable[[GgufTensor], FloatArray],
) -> PreparedPooler | None:
    """The pooler of a file, whose tensors are taken out of `tensors`; `floats` reads one. None if the model generates
    text. Raises ModelError, naming the key or the tensor."""
    key = f"{architecture}.pooling_type"
    found = metadata.get(key, int)
    if found in (None, NONE):
        if config.causal:
            return None
        pooling: PoolingKind = "mean"  # as sentence-transformers, if the files don't say it
    elif found in POOLINGS:
        pooling = POOLINGS[found]
    elif found == RANK:
        return _Layers(metadata, config, tensors, floats).reranker(architecture)
    else:
        raise ModelError(
            f"{metadata.path}: {key} is {found}; supported are 0 (none), 1 (mean), 2 (cls), 3 (last), 4 (rank)"
        )
    layers = _Layers(metadata, config, tensors, floats)
    for name in DENSE:
        if name in tensors:
            layers.add(name, None)
    return layers.made(pooling, None)


class _Layers:
    """Collects the layers after the pooling."""

    def __init__(
        self,
        metadata: Metadata,
        config: ModelConfig,
        tensors: dict[str, GgufTensor],
        floats: Callable[[GgufTensor], FloatArray],
    ) -> None:
        self._metadata, self._config, self._tensors, self._floats = metadata, config, tensors, floats
        self._layers: list[HeadLayer] = []
        self._arrays: dict[str, FloatArray] = {}
        tensors.pop("output.weight", None)  # an LM head, which such a model does not use

    def reranker(self, architecture: str) -> PreparedPooler:
        """BERT's form has the first token and a layer of its own; a decoder's has the last token, and for Qwen3 the
        rows of yes and no in the LM head, of which llama.cpp takes the softmax."""
        if self._config.causal:
            self.add(*SECOND, is_difference=architecture == "qwen3")
        else:
            if FIRST[0] in self._tensors:
                self.add(*FIRST, activation="tanh")
            self.add(*SECOND)
        return self.made("last" if self._config.causal else "cls", self._labels(architecture))

    def add(
        self, name: str, bias: str | None, activation: HeadActivation = "identity", *, is_difference: bool = False
    ) -> None:
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise ModelError(f"{self._metadata.path}: the tensor {name} is missing")
        before = self._layers[-1].num_outputs if self._layers else self._config.hidden_size
        shape = tensor.shape if len(tensor.shape) > 1 else (1, *tensor.shape)
        if len(shape) != 2 or shape[1] != before:
            raise ModelError(
                f"{self._metadata.path}: tensor {name} has shape {tensor.shape}; it must have {before} columns"
            )
        weight = self._floats(tensor).reshape(shape)
        added = None if bias is None else self._tensors.pop(bias, None)
        if is_difference and len(weight) == 2:
            weight = weight[:1] - weight[1:]
        index = len(self._layers)
        self._arrays[f"{index}.weight"] = np.ascontiguousarray(weight)
        if added is not None:
            vector = self._floats(added).reshape(-1)
            if len(vector) != len(weight):
                raise ModelError(f"{self._metadata.path}: tensor {bias} has {len(vector)} numbers, not {len(weight)}")
            self._arrays[f"{index}.bias"] = vector
        self._layers.append(
            HeadLayer(num_inputs=before, num_outputs=len(weight), bias=added is not None, activation=activation)
        )

    def made(self, pooling: PoolingKind, labels: Classifier | None) -> PreparedPooler:
        width = self._layers[-1].num_outputs if self._layers else self._config.hidden_size
        for name, array in self._arrays.items():
            if not np.isfinite(array).all():
                raise ModelError(
                    f"{self._metadata.path}: layer {name} after the pooling has values that are not finite"
                )
        return PreparedPooler(
            Pooler(pooling=pooling, layers=self._layers, width=width, classifier=labels), self._arrays
        )

    def _labels(self, architecture: str) -> Classifier:
        num = self._layers[-1].num_outputs
        named = labels_of(self._metadata, architecture)
        if num == 1:
            return Classifier(labels=["LABEL_0"], activation="sigmoid")
        labels = [f"LABEL_{i}" for i in range(num)] if named is None else named
        if len(labels) != num or num > MAX_LABELS or max(map(len, labels)) > MAX_LABEL_CHARS:
            raise ModelError(
                f"{self._metadata.path}: {architecture}.classifier.output_labels has {len(labels)} labels; there are "
                f"{num} logits"
            )
        return Classifier(labels=labels, activation="softmax")
