"""Layers that only some models have, and sizes that differ from layer to layer."""

from typing import Literal, NamedTuple

import msgspec


class Experts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The feed-forward layers that are mixtures of experts (Shazeer et al., 2017, arXiv:1701.06538)."""

    num: int
    num_per_token: int
    """The experts that compute a token: those with the largest scores."""
    intermediate_size: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """How the router's logits become scores, the weights of the experts' results."""
    normalized: bool = False
    """Whether the weights of a token are divided by their sum. With softmax, this is the softmax of the chosen logits
    alone."""
    scale: float = 1.0
    """Factor of the weights."""
    softcap: float = 0.0
    """c in c * tanh(logit / c), which become scores; 0: logits do."""
    router_bias: bool = False
    """Whether the router has a bias."""
    selection_bias: bool = False
    """Whether a bias is added to the scores to choose experts, but not to their weights (DeepSeek-V3)."""
    num_groups: int = 1
    """Equal groups of adjacent experts. With more than one, a token's experts are in the `groups_per_token` best groups
    (DeepSeek-V2 and V3)."""
    groups_per_token: int = 1
    best_of_group: int = 2
    """1: a group is as good as its best expert's score, with the selection bias; 2: as the sum of its two best."""
    bias: bool = False
    """Whether the matrices of experts have biases."""
    shared_intermediate_size: int = 0
    """Of the expert that computes every token; 0 if there is none."""
    shared_gate: bool = False
    """Whether the shared expert's result is multiplied with the sigmoid of a projection of its input."""
    beside_dense: bool = False
    """Whether layers with experts have a dense feed-forward layer, too (Gemma 4 26B-A4B): both read the hidden states,
    each has norms of its own before and after it, and the norm after the feed-forward layer is that of their sum."""
    router_norm: bool = False
    """Whether the router reads a norm of its own of the hidden states, divided by sqrt(hidden_size)."""
    factors: bool = False
    """Whether each expert's weight is multiplied with a number of its own, after it was normalized."""
    layers: list[int] | None = None
    """The layers with experts; None: all. The others have a dense feed-forward layer."""


class DeltaNet(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The layers with a recurrent state in place of attention: gated DeltaNet (Yang et al., 2024, arXiv:2412.06464).
    They have norms before them and before their feed-forward layer, and none after, whatever the others have."""

    layers: list[int]
    key_heads: int
    value_heads: int
    """A multiple of `key_heads`; adjacent value heads share a key head."""
    tiled: bool = False
    """Whether value heads that are `key_heads` apart do, and not adjacent ones, as in .gguf files."""
    key_dim: int
    value_dim: int
    beta: float = 1.0
    """Factor of the sigmoid that says how much of a state is replaced."""
    eps: float
    """Of the norm of each head's result."""


class ShortConv(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The layers with a short convolution in place of attention (LFM2): c * conv(b * x), where b, c and x are
    projections of the hidden states. Their state is the last products b * x."""

    layers: list[int]
    taps: int
    """Tokens that the convolution reads."""


class Eagle3(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an EAGLE-3 head has besides a Llama layer."""

    layers: list[int]
    """Three layers of the model, in rising order; the head reads the hidden states before each of them."""
    draft_vocab_size: int
    """Rows of its LM head."""
    norm_before_residual: bool = False
    """Whether the residual begins with the normalized hidden states."""


class Heads(NamedTuple):
    """The heads of a layer's attention."""

    num: int
    """Query heads."""
    num_kv: int
    dim: int

    @property
    def query_size(self) -> int:
        return self.num * self.dim

    @property
    def kv_size(self) -> int:
        return self.num_kv * self.dim


class OtherHeads(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Layers whose heads differ from those of the other layers (Gemma 4: layers without a window)."""

    layers: list[int]
    num_kv_heads: int
    head_dim: int
    values_are_keys: bool = False
    """Whether these layers have no projection of values: values are the projected keys, before their norm and rotary
    embedding."""


class PerLayerInputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Embeddings of each token that are added in each layer (Gemma 4 E2B): after the feed-forward layer, a gate of the
    hidden states is multiplied with them.

    The inputs of a layer are (norm(project(embedding) / sqrt(hidden_size)) + row * sqrt(size)) / sqrt(2). A row of the
    table has those of all layers."""

    size: int
    """Of the inputs of a layer."""
    vocab_size: int
    """Rows of the table."""
