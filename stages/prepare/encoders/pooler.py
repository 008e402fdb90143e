"""Makes a model's `Pooler` of its class and of the files of sentence-transformers, and writes the tensors of its
layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors.numpy import save_file

from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.pooler import HEAD_FILE, Classifier, HeadLayer, LogitActivation, Pooler
from pipeline.stages.prepare.encoders.heads import Head, HeadModule
from pipeline.stages.prepare.encoders.sentence_transformers import DenseModule, FloatArray, Modules, read_tensor
from pipeline.stages.prepare.families.keys import ConfigFault
from pipeline.stages.prepare.files import shown
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.weights.tensors import STORED, Found, float_rows

ROWS = 1024
"""Rows of an embedding that are read at once."""
MAX_LABELS = 100_000
MAX_LABEL_CHARS = 1000
LABEL_ACTIVATIONS: dict[str, LogitActivation] = {"Identity": "identity", "Sigmoid": "sigmoid", "Softmax": "softmax"}
"""The last parts of torch's names."""
PROBLEMS: dict[str, LogitActivation] = {
    "regression": "identity",
    "multi_label_classification": "sigmoid",
    "single_label_classification": "softmax",
}
PROBLEM = "problem_type"


@dataclass(frozen=True, slots=True)
class PreparedPooler:
    """A pooler, and what belongs to it."""

    pooler: Pooler
    tensors: dict[str, FloatArray]
    """Of `HEAD_FILE`."""
    used: frozenset[str] = frozenset()
    """The names of the checkpoint's tensors that it has."""

    def write(self, target: Path) -> None:
        """Write the tensors to a prepared folder, if there are any."""
        if self.tensors:
            save_file(self.tensors, target / HEAD_FILE)


class PoolerReader:
    """Reads the pooler of one model. Raises ModelError, naming the file and the field."""

    def __init__(
        self, path: Path, config: Mapping[str, Any], model: ModelConfig, found: Found, modules: Modules | None
    ) -> None:
        """`path` and `config` are config.json, `found` the tensors of the checkpoint."""
        self._path, self._config, self._model, self._found = path, config, model, found
        self._modules = modules or Modules()
        self._tensors: dict[str, FloatArray] = {}
        self._layers: list[HeadLayer] = []
        self._used: set[str] = set()

    def read(self, head: Head | None, pairs: tuple[int, int] | None = None) -> PreparedPooler | None:
        """The pooler of a model whose class has this head, or which scores by the logits of a true and a false token
        (`pairs`). None if the model generates text."""
        modules = self._modules
        try:
            if head is not None or modules.score is not None or pairs is not None:
                return self._classifier(head, pairs)
            if modules.pooling is None and self._model.causal:
                return None
            for dense in _folded(modules.dense):
                self._add_dense(dense)
            # A folder without modules.json gets the mean, as in sentence-transformers.
            return self._made(modules.pooling or "mean", normalize=modules.normalize)
        except ConfigFault as fault:
            raise ModelError(f"{self._path}: {fault}") from fault

    def _classifier(self, head: Head | None, pairs: tuple[int, int] | None) -> PreparedPooler:
        if self._modules.pooling is not None or self._modules.dense:
            raise ConfigFault("architectures is that of a classifier, but modules.json has a Pooling or Dense module")
        if (score := self._modules.score) is not None:
            pairs = score.true_id, -1 if score.false_id is None else score.false_id
        if head is None or pairs is not None:
            assert pairs is not None
            self._add_token_logits(*pairs)
            return self._made("last", self._labels(1))
        labels = self._labels()
        for module in head.modules:
            self._add_module(module, labels.num_labels)
        return self._made(head.pooling, labels)

    def _made(self, pooling: Any, labels: Classifier | None = None, *, normalize: bool = True) -> PreparedPooler:
        modules = self._modules
        width = self._layers[-1].num_outputs if self._layers else self._model.hidden_size
        pooler = Pooler(
            pooling=pooling,
            layers=self._layers,
            width=width,
            normalize=normalize,
            classifier=labels,
            matryoshka_dimensions=self._dimensions(width),
            prompts=modules.prompts,
            default_prompt=modules.default_prompt,
            max_seq_length=modules.max_seq_length,
        )
        return PreparedPooler(pooler, self._tensors, frozenset(self._used))

    def _dimensions(self, width: int) -> list[int] | None:
        """`matryoshka_dimensions`, which is vLLM's key."""
        sizes = self._config.get("matryoshka_dimensions")
        if sizes is None:
            return None
        if not isinstance(sizes, list) or not all(type(size) is int and 1 <= size <= width for size in sizes):
            raise ConfigFault(f"matryoshka_dimensions is {shown(sizes)}; it must be a list of integers up to {width}")
        return sorted(set(sizes))

    # Layers

    def _add(self, layer: HeadLayer, **tensors: FloatArray | None) -> None:
        """Append a layer. The tensors are by the last parts of their names, with underscores for dots."""
        before = self._layers[-1].num_outputs if self._layers else self._model.hidden_size
        if layer.num_inputs != before:
            raise ConfigFault(
                f"layer {len(self._layers)} after the pooling has {layer.num_inputs} inputs, not {before}"
            )
        for name, tensor in tensors.items():
            if tensor is not None:
                if not np.isfinite(tensor).all():
                    raise ConfigFault(f"layer {len(self._layers)} after the pooling has values that are not finite")
                self._tensors[f"{len(self._layers)}.{name.replace('_', '.')}"] = np.ascontiguousarray(tensor)
        self._layers.append(layer)

    def _add_dense(self, dense: DenseModule) -> None:
        outputs, inputs = dense.weight.shape
        layer = HeadLayer(
            num_inputs=inputs, num_outputs=outputs, bias=dense.bias is not None, activation=dense.activation
        )
        self._add(layer, weight=dense.weight, bias=dense.bias)

    def _add_module(self, module: HeadModule, num_labels: int) -> None:
        hidden = self._model.hidden_size
        outputs = hidden if module.outputs == "hidden_size" else num_labels
        layer = HeadLayer(
            num_inputs=hidden,
            num_outputs=outputs,
            bias=module.bias,
            activation=module.activation,
            norm=module.norm is not None,
            norm_bias=module.norm_bias,
            norm_eps=module.norm_eps,
        )
        norm = module.norm
        self._add(
            layer,
            weight=self._tensor(f"{module.name}.weight", outputs, hidden),
            bias=self._tensor(f"{module.name}.bias", outputs) if module.bias else None,
            norm_weight=None if norm is None else self._tensor(f"{norm}.weight", outputs),
            norm_bias=self._tensor(f"{norm}.bias", outputs) if module.norm_bias else None,
        )

    def _add_token_logits(self, true_id: int, false_id: int) -> None:
        """The difference between the logits of two tokens, or the logit of the first if the second is -1."""
        model = self._model
        module = "model.embed_tokens" if model.tie_embeddings else "lm_head"
        name = model.layout.find(f"{module}.weight")[0]
        rows = []
        for token in (true_id, false_id):
            if token >= model.vocab_size or (token < 0 and token != -1):
                raise ConfigFault(f"a score by the logits of token {token} needs an id below {model.vocab_size}")
            rows.append(np.zeros(model.hidden_size, np.float32) if token < 0 else self._row(name, token))
        layer = HeadLayer(num_inputs=model.hidden_size, num_outputs=1)
        self._add(layer, weight=(rows[0] - rows[1])[None])

    def _row(self, name: str, row: int) -> FloatArray:
        if name not in self._found:
            raise ConfigFault(f"the weights have no tensor {name!r}, which the score is made of")
        path, entry = self._found[name]
        if entry.dtype not in STORED or entry.shape != (self._model.vocab_size, self._model.hidden_size):
            raise ConfigFault(
                f"tensor {name!r} is {entry.dtype} {shown(entry.shape)}; it must be floats for each token"
            )
        (rows,) = islice(float_rows(path, entry, ROWS), row // ROWS, row // ROWS + 1)
        return np.array(rows[row % ROWS], np.float32)

    def _tensor(self, name: str, *shape: int) -> FloatArray:
        """A tensor of the checkpoint, with or without the prefix of the base model."""
        base = self._model.layout.layers.partition(".")[0]
        stored = next((each for each in (name, f"{base}.{name}") if each in self._found), None)
        if stored is None:
            raise ConfigFault(f"the weights have no tensor {name!r}, which the class in architectures has")
        self._used.add(stored)
        path, entry = self._found[stored]
        return read_tensor(path, {stored: entry}, stored, shape)

    # Labels

    def _labels(self, num: int | None = None) -> Classifier:
        """The labels of config.json; with `num`, so many without names if there are none."""
        problem = self._config.get(PROBLEM)
        if problem is not None and problem not in PROBLEMS:
            raise ConfigFault(f"{PROBLEM} is {shown(problem)}; supported are {', '.join(PROBLEMS)}")
        names = self._names(num)
        return Classifier(labels=names, activation=self._activation(problem, len(names)), problem_type=problem)

    def _names(self, num: int | None) -> list[str]:
        named = self._config.get("id2label")
        if num is not None or named is None:
            count = self._config.get("num_labels", 2) if num is None else num
            if type(count) is not int or not 1 <= count <= MAX_LABELS:
                raise ConfigFault(f"num_labels is {shown(count)}; it must be an integer from 1 to {MAX_LABELS}")
            return [f"LABEL_{i}" for i in range(count)]
        if not isinstance(named, dict) or not 1 <= len(named) <= MAX_LABELS:
            raise ConfigFault(f"id2label is {shown(named)}; it must be an object with 1 to {MAX_LABELS} labels")
        names = [named.get(str(i)) for i in range(len(named))]
        for i, name in enumerate(names):
            if not isinstance(name, str) or len(name) > MAX_LABEL_CHARS:
                raise ConfigFault(f"id2label has {shown(name)} for {i}; it must have a name for each number from 0 on")
        return [str(name) for name in names]

    def _activation(self, problem: Any, num_labels: int) -> LogitActivation:
        """What sentence-transformers' file names, or config.json for it; else by the problem, else by the number of
        labels, as in vLLM."""
        own = self._config.get("sentence_transformers")
        in_config = own.get("activation_fn") if isinstance(own, dict) else None
        named = self._modules.label_activation or in_config or self._config.get("sbert_ce_default_activation_function")
        if named is not None:
            known = LABEL_ACTIVATIONS.get(named.rpartition(".")[2]) if isinstance(named, str) else None
            if known is None:
                raise ConfigFault(f"activation_fn is {shown(named)}; supported are {', '.join(LABEL_ACTIVATIONS)}")
            return known
        if problem is not None:
            return PROBLEMS[problem]
        return "sigmoid" if num_labels == 1 else "softmax"


def _folded(modules: list[DenseModule]) -> list[DenseModule]:
    """The modules with those that have no activation between them multiplied, where that makes them smaller."""
    made: list[DenseModule] = []
    for module in modules:
        before = made[-1] if made else None
        if (
            before is not None
            and before.activation == "identity"
            and len(before.weight) == module.weight.shape[1]
            and module.weight.shape[0] * before.weight.shape[1] < before.weight.size + module.weight.size
        ):
            weight = module.weight.astype(np.float64)
            bias = module.bias
            if before.bias is not None:
                carried = weight @ before.bias
                bias = (carried + (0 if bias is None else bias)).astype(np.float32)
            made[-1] = DenseModule((weight @ before.weight).astype(np.float32), bias, module.activation)
        else:
            made.append(module)
    return made


def with_pooler(model: ModelConfig, prepared: PreparedPooler | None) -> ModelConfig:
    """The config with the pooler. Such a model has no LM head."""
    if prepared is None:
        return model
    return msgspec.structs.replace(model, pooler=prepared.pooler, tie_embeddings=False)
