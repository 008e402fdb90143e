"""The transformers side of `check-model` for models that make embeddings, scores or labels.

The class in `architectures` computes its own labels. Of other models, the hidden states are pooled here, as the files
of sentence-transformers say. Only the layer of a reranker that scores by the logits of two tokens is that of prepare.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from pipeline.cli.check.cases import Ids, Logits
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.pooler import HEAD_FILE, PoolingKind
from pipeline.stages.prepare.check_model import gguf_reference
from pipeline.stages.prepare.encoders import sentence_transformers
from pipeline.stages.prepare.encoders.heads import SEQUENCE, TOKENS

ACTIVATIONS: dict[str, Any] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": torch.nn.functional.silu,
}


def loader_of(config: dict[str, Any], *, is_encoder: bool) -> Any:
    """The class of transformers that loads a checkpoint for labels, or an encoder; None for models that generate
    text."""
    from transformers import AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification

    name = str((config.get("architectures") or [""])[0])
    if name.endswith(SEQUENCE):
        return AutoModelForSequenceClassification
    if name.endswith(TOKENS):
        return AutoModelForTokenClassification
    return AutoModel if is_encoder else None


class _Layer(NamedTuple):
    weight: Tensor
    bias: Tensor | None
    activation: str


def results_of(model: Any, wanted: Iterable[Ids], source: Path, prepared: Path) -> dict[Ids, Logits]:
    """The vector of each text, or the logits of its labels; with labels of tokens, those of one after the other.
    `source` is the folder of the checkpoint, `prepared` what prepare has made of it."""
    pooler = ModelConfig.load(prepared).pooler
    assert pooler is not None
    if gguf_reference.is_gguf(source):
        pooling, given = gguf_reference.head_of(source, ModelConfig.load(prepared))
        layers = [
            _Layer(torch.from_numpy(weight), None if bias is None else torch.from_numpy(bias), activation)
            for weight, bias, activation in given
        ]
        return {ids: _result(model, ids, pooling, layers) for ids in wanted}
    modules = sentence_transformers.read(source)
    pooling, layers = pooler.pooling, list[_Layer]()
    if pooler.classifier is not None:
        tensors = load_file(prepared / HEAD_FILE) if pooler.layers else {}
        layers = [_Layer(tensors[f"{i}.weight"], None, one.activation) for i, one in enumerate(pooler.layers)]
    elif modules is not None and modules.pooling is not None:
        pooling = modules.pooling
        for dense in modules.dense:
            bias = None if dense.bias is None else torch.from_numpy(dense.bias)
            layers.append(_Layer(torch.from_numpy(dense.weight), bias, dense.activation))
    return {ids: _result(model, ids, pooling, layers) for ids in wanted}


@torch.inference_mode()
def _result(model: Any, ids: Ids, pooling: PoolingKind, layers: Sequence[_Layer]) -> Logits:
    out = model(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long))
    if hasattr(out, "logits"):
        logits: Logits = out.logits[0].float().numpy().reshape(-1)
        return logits
    states = out.last_hidden_state[0].float()
    numbers = torch.arange(1, len(ids) + 1)[:, None]
    pooled = {
        "cls": lambda: states[0],
        "last": lambda: states[-1],
        "mean": lambda: states.mean(0),
        "max": lambda: states.max(0).values,
        "mean_sqrt_len": lambda: states.sum(0) / len(ids) ** 0.5,
        "weighted_mean": lambda: (states * numbers).sum(0) / numbers.sum(),
        "all": lambda: states,
    }[pooling]()
    for layer in layers:
        pooled = ACTIVATIONS[layer.activation](torch.nn.functional.linear(pooled, layer.weight, layer.bias))
    vector: Logits = pooled.numpy().reshape(-1).astype(np.float32)
    return vector


def is_rounded(name: str, model: Any) -> bool:
    """Whether our inexact programs have a parameter in bfloat16: heads, and biases by distance, stay float32."""
    base = f"{model.base_model_prefix}."
    is_base = model.base_model is model
    return (is_base or name.startswith(base)) and "pooler." not in name and "relative_attention_bias" not in name
