"""What becomes of a model's last hidden states if it does not generate text: embeddings, scores, labels.

    hidden states ─► pooling ─► layers ─► vector, cut to `dimensions` and normalized, or logits, with an activation

The executor computes the pooling and the layers, and its results are `Pooler.width` floats for a prompt, or for each of
its tokens. Who makes the reply cuts, normalizes and activates them.
"""

from typing import Literal

import msgspec

HEAD_FILE = "head.safetensors"
"""The tensors of `Pooler.layers` in a prepared folder, float32: `N.weight` [num_outputs, num_inputs], `N.bias`,
`N.norm.weight` and `N.norm.bias` [num_outputs]; N is the layer's number."""

Task = Literal["generate", "embed", "token_embed", "classify", "token_classify", "score"]
"""What a model can be asked for, in vLLM's words."""
PoolingKind = Literal["cls", "mean", "last", "max", "mean_sqrt_len", "weighted_mean", "all"]
"""How the hidden states of a prompt become one vector: that of its first token, the mean, that of its last token, the
largest number of each dimension, the sum divided by the root of the number of tokens, the mean weighted by position (1,
2, …), or the vectors of all tokens."""
HeadActivation = Literal["identity", "tanh", "relu", "gelu", "gelu_tanh", "silu"]
LogitActivation = Literal["identity", "sigmoid", "softmax"]


class HeadLayer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """norm(activation(W x + b))"""

    num_inputs: int
    num_outputs: int
    bias: bool = False
    activation: HeadActivation = "identity"
    norm: bool = False
    """Whether the result has a layer norm with a weight."""
    norm_bias: bool = False
    norm_eps: float = 1e-5


class Classifier(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the numbers of a result are, if they are logits of labels."""

    labels: list[str]
    """The name of each logit (`id2label`)."""
    activation: LogitActivation
    """What makes probabilities, or a cross-encoder's score, of logits."""
    problem_type: str | None = None
    """single_label_classification, multi_label_classification or regression, if the model's files say so."""

    @property
    def num_labels(self) -> int:
        return len(self.labels)


class PairTemplates(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Chat templates that make one prompt of a query and a document, for rerankers that are decoders."""

    files: list[str]
    """Of the prepared folder. The first that writes both texts is used."""
    variables: str = ""
    """JSON text: an object of further variables."""
    adds_special_tokens: bool = False
    """Whether the tokenizer adds its special tokens to what the template writes."""


class Pooler(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a model makes embeddings, scores or labels."""

    pooling: PoolingKind
    layers: list[HeadLayer] = []
    """Applied one after the other to what was pooled."""
    width: int
    """Floats of a result: of a prompt, or of each token with the pooling "all"."""
    normalize: bool = True
    """Whether embeddings have length 1, by the model's files."""
    classifier: Classifier | None = None
    """None if results are embeddings."""
    matryoshka_dimensions: list[int] | None = None
    """The `dimensions` that a request may ask for; None: all up to `width`."""
    prompts: dict[str, str] = {}
    """Texts that go before the input, by name, such as "query" and "document" (sentence-transformers)."""
    default_prompt: str | None = None
    """The name of the prompt of requests that name none."""
    max_seq_length: int | None = None
    """Tokens after which sentence-transformers cuts a text; the server cuts only if a request asks for it."""
    pairs: PairTemplates | None = None
    """None: the tokenizer's post-processor joins the texts of a pair."""

    @property
    def tasks(self) -> tuple[Task, ...]:
        """What the model can be asked for. One with a single logit for a prompt is a cross-encoder, which scores
        pairs."""
        if self.classifier is None:
            return ("embed", "token_embed")
        if self.pooling == "all":
            return ("token_classify",)
        return ("classify", "score") if self.classifier.num_labels == 1 else ("classify",)


LAST_TOKEN = Pooler(pooling="last", width=0)
"""Of a model that generates: it stores no pooler. The width of its embeddings is the model's."""
