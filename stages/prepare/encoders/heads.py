"""The heads of classifiers: which class of transformers has which, by the end of its name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from pipeline.runtime.model.pooler import HeadActivation, PoolingKind
from pipeline.stages.prepare.families.keys import ACTIVATIONS, ConfigFault, Keys
from pipeline.stages.prepare.files import shown

SEQUENCE, TOKENS = "ForSequenceClassification", "ForTokenClassification"
WITHOUT_LABELS = ("Model", "ForMaskedLM", "ForPreTraining")
"""The same of encoders without labels. What the last two have after the model is not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadModule:
    """A layer of a head."""

    name: str
    """Of its tensors; without the prefix of the base model."""
    outputs: Literal["hidden_size", "labels"] = "labels"
    activation: HeadActivation = "identity"
    bias: bool = True
    norm: str | None = None
    """The name of the layer norm after it."""
    norm_bias: bool = False
    norm_eps: float = 1e-5


@dataclass(frozen=True, slots=True)
class Head:
    """What a class has after the model."""

    pooling: PoolingKind
    modules: tuple[HeadModule, ...]


Heads = Mapping[str, Callable[[Keys], Head]]
"""By the end of the class's name."""

SCORE = "score"
DECODER_HEADS: Heads = {
    SEQUENCE: lambda keys: Head("last", (HeadModule(name=SCORE, bias=False),)),
    TOKENS: lambda keys: Head("all", (HeadModule(name=SCORE),)),
}
CLASSIFIER = HeadModule(name="classifier")
TOKEN_HEAD = Head("all", (CLASSIFIER,))
BERT_HEADS: Heads = {
    SEQUENCE: lambda keys: Head(
        "cls", (HeadModule(name="pooler.dense", outputs="hidden_size", activation="tanh"), CLASSIFIER)
    ),
    TOKENS: lambda keys: TOKEN_HEAD,
}
ROBERTA_HEADS: Heads = {
    SEQUENCE: lambda keys: Head(
        "cls",
        (
            HeadModule(name="classifier.dense", outputs="hidden_size", activation="tanh"),
            HeadModule(name="classifier.out_proj"),
        ),
    ),
    TOKENS: lambda keys: TOKEN_HEAD,
}


def head_activation(keys: Keys, key: str, default: str) -> HeadActivation:
    """The activation that a key names. Raises ConfigFault for one that heads don't have."""
    value = str(keys.get(key, str, default))
    found = "tanh" if value == "tanh" else ACTIVATIONS.get(value)
    if found in ("silu", "gelu", "gelu_tanh", "relu", "tanh"):
        return found
    raise ConfigFault(f"{keys.name(key)} is {shown(value)}, which is not supported in a head")
