"""The forward pass as a program: recorded once when the model is loaded, replayed for each step.

A model describes itself by calling the methods below in order; nothing is computed. A back end turns each call into
torch calls, ops of the CPU library, or a captured graph. All ops share one residual, float32 [tokens, hidden_size]: it
sums up all layers, and rounding it to bfloat16 in each would lose the most precision.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from pipeline.kernels.stored_matrix import StoredMatrix
from pipeline.runtime.model.rope import Rope
from pipeline.runtime.model.special_layers import Heads

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.kernels.matrix import Matrix

LogitArray = np.ndarray[Any, np.dtype[np.float32]]

AnyMatrix: TypeAlias = "StoredMatrix | Matrix"
"""A weight as it is stored, or in torch. The CPU library takes both, without importing torch."""

AnyVector: TypeAlias = "LogitArray | Tensor"
"""float32."""


@dataclass(frozen=True, slots=True)
class Linear:
    """Stacked matrices [outputs, inputs] with the same input, and their bias, float32 [all outputs]."""

    matrices: tuple[AnyMatrix, ...]
    bias: "AnyVector | None" = None
    group: int = 0
    """Columns with a common scale, where the matrices are a part of larger ones that are quantized while loading; 0:
    the back end chooses."""


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm of hidden states, of the kind in `ModelConfig.norm`. Weight and bias are [hidden_size]."""

    weight: AnyVector
    bias: "AnyVector | None" = None
    eps: float | None = None
    """None: that of the model."""

    def as_arrays(self) -> "Norm":
        """The same in numpy; it must be in host memory."""
        bias = None if self.bias is None else np.asarray(self.bias, np.float32)
        return Norm(np.asarray(self.weight, np.float32), bias, self.eps)


@dataclass(frozen=True, slots=True)
class Embedding:
    """What the first hidden states are made of."""

    table: AnyMatrix
    """[vocab_size, hidden_size]"""
    positions: "AnyMatrix | None" = None
    """Learned positions, [position_embeddings, hidden_size]; for each token type one after the other, if the model has
    types. See `StepInputs.position_rows`."""
    norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights of the norms of queries and keys, before rotary embedding: [head_dim], or [num_heads * head_dim] and
    [num_kv_heads * head_dim] unless `ModelConfig.qk_norm_kind` is "head"."""

    query: AnyVector
    key: "AnyVector | None"
    """None if the layer has no keys of its own."""


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Self-attention and the norms before and after it."""

    norm: Norm | None
    qkv: Linear
    """Queries, keys and values, stacked; only queries if there is a `source`."""
    out: Linear
    heads: Heads
    source: int | None = None
    """The layer whose keys and values it reads, if it has none of its own."""
    value_norm: bool = False
    """Whether each head of values goes through an RMS norm without weights."""
    head_norms: HeadNorms | None = None
    window: int | None = None
    """Number of positions that a token attends to, including its own; None for no limit."""
    window_after: int | None = None
    """How many positions after its own it attends to, besides the limit in `StepInputs.key_ends`; None: only that
    limits it."""
    in_windows: bool = False
    """Whether tokens are those of other entries (`StepInputs.windows`)."""
    rope: Rope | None = None
    sinks: "AnyVector | None" = None
    """[num_heads], the scores of the heads' sinks."""
    biases: "AnyVector | None" = None
    """[num_heads, 2 * reach + 1]; what is added to scores by the distance from the query to the key, which is at least
    -reach and at most reach."""
    gate: Linear | None = None
    """[num_heads * head_dim, hidden_size], or [num_heads, hidden_size]: attention's result is multiplied with the
    sigmoid of its results, or with their softplus."""
    post_norm: Norm | None = None
    residual_norm: Norm | None = None
    """Of the residual, after attention's result was added to it."""

    @property
    def has_keys(self) -> bool:
        """Whether it makes keys and values."""
        return self.source is None


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """A gated DeltaNet layer, which has a recurrent state in place of attention, and the norm before it."""

    norm: Norm | None
    inputs: Linear
    """Queries, keys, values, z, b and a, stacked."""
    conv: "AnyVector"
    """[4, channels], the channels of queries, keys and values; the last one is that of the token itself."""
    rates: "AnyVector"
    """[value heads]: -exp(A_log)"""
    dt_bias: "AnyVector"
    """[value heads]"""
    head_norm: "AnyVector"
    """[value_dim]"""
    out: Linear


@dataclass(frozen=True, slots=True)
class ShortConvWeights:
    """A short convolution in place of attention, and the norm before it."""

    norm: Norm | None
    inputs: Linear
    """b, c and x, stacked: [3 * hidden_size, hidden_size]."""
    conv: "AnyVector"
    """[taps, hidden_size]; the last one is that of the token itself."""
    out: Linear
    post_norm: Norm | None = None


RecurrentWeights = DeltaWeights | ShortConvWeights


class XieluForm(NamedTuple):
    """positive * x^2 + linear * x for x > 0, else negative * (exp(min(x, largest)) - 1 - x) + linear * x (Huang and
    Schlag, 2024, arXiv:2411.13010)."""

    positive: float
    negative: float
    linear: float
    largest: float


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """The feed-forward layer and the norms before and after it."""

    norm: Norm | None
    gate_up: Linear
    """Gate and up, stacked; only up if the layer is not gated."""
    down: Linear
    post_norm: Norm | None = None
    residual_norm: Norm | None = None
    """As of attention."""
    residual_scale: float = 1.0
    """Factor of the residual, after the result was added to it."""
    xielu: XieluForm | None = None
    """Of the activation "xielu"."""


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """What `per_layer` reads of each token: see `PerLayerInputs`."""

    table: AnyMatrix
    """[vocab_size, layers * size]. Its rows are read where the file is mapped: it is not loaded."""
    project: Linear
    """[layers * size, hidden_size]"""
    norm: AnyVector
    """[size]"""


@dataclass(frozen=True, slots=True)
class PerLayerWeights:
    """What adds the inputs of a layer."""

    gate: Linear
    """[size, hidden_size]"""
    out: Linear
    """[hidden_size, size]"""
    post_norm: Norm
    residual_scale: float = 1.0
    """As of the feed-forward layer."""


@dataclass(frozen=True, slots=True)
class ExpertsWeights:
    """A mixture of experts and the norms before and after it."""

    norm: Norm | None
    router: Linear
    """[experts, hidden_size]; if the shared expert has a gate, that is the last row of [experts + 1, hidden_size]."""
    gate_up: Linear
    """Gate and up of the first expert, then those of the next one; only up if the layer is not gated."""
    down: Linear
    """Of the first expert, then that of the next one."""
    selection_bias: "AnyVector | None" = None
    """[experts]"""
    shared: tuple[Linear, Linear] | None = None
    """Gate and up, and down, of the expert that computes every token."""
    post_norm: Norm | None = None
    factors: "AnyVector | None" = None
    """[experts], of the experts' weights."""
    router_norm: Norm | None = None
    """What the router reads, if not the results of `norm`."""
    dense: MlpWeights | None = None
    """The dense feed-forward layer beside them, with its own norms."""
    sum_norm: Norm | None = None
    """Of the sum of both, if there is a dense layer."""
    residual_scale: float = 1.0
    """As of the feed-forward layer; only with a dense layer."""


@dataclass(frozen=True, slots=True)
class Head:
    """The last norm and the LM head [vocab_size, hidden_size]."""

    norm: Norm | None
    """None if the hidden states are normed already."""
    matrix: AnyMatrix
    bias: "AnyVector | None" = None


class ProgramBuilder(ABC):
    """Records a model's forward pass when it is loaded. Fields of `ModelConfig` say how each op computes."""

    last_norm: Norm | None = None
    """The norm in `sample` or `pool`; its arrays are float32 in host memory."""
    num_encoded_layers: int = 0
    """Behind so many first layers, `add_encoded` follows."""

    @abstractmethod
    def embed(self, embedding: Embedding | None) -> None:
        """residual = norm(table[ids] * embedding_scale + positions[position]). None: the caller writes `residual`
        before each step, which not all back ends support."""

    def token_inputs(self, weights: TokenInputs) -> None:
        """Make the inputs of all layers, of the residual after `embed`. Only back ends with `Feature.PER_LAYER_INPUTS`
        have it."""
        raise NotImplementedError("this back end has no inputs of layers")

    def per_layer(self, weights: PerLayerWeights) -> None:
        """residual += post_norm(out(activation(gate(residual)) * the inputs of this layer)), then residual *=
        residual_scale. As `token_inputs`."""
        raise NotImplementedError("this back end has no inputs of layers")

    @abstractmethod
    def attention(self, weights: AttentionWeights) -> None:
        """residual += post_norm(out(attention(rotate(head_norms(qkv(norm(residual))))))) * residual_multiplier, then
        residual = residual_norm(residual). Writes the step's keys and values to the next layer's cache first."""

    def add_encoded(self, layer: int) -> None:
        """residual += numbers (layer + 1) * hidden_size and so on of a row of the encoder cache, at the positions of
        images (DeepStack: Meng et al., 2024, arXiv:2406.04334). The layer is the one before. Only back ends that encode
        images have it."""
        raise NotImplementedError("this back end reads no images")

    @abstractmethod
    def recurrent(self, weights: RecurrentWeights) -> None:
        """residual += post_norm(out(f(inputs(norm(residual))))) * residual_multiplier, with the f of the weights' kind;
        see kernels/recurrent/. Reads and writes the layer's part of the entries' slots."""

    @abstractmethod
    def mlp(self, weights: MlpWeights) -> None:
        """residual += post_norm(down(activation(gate(x)) * up(x))) * residual_multiplier, x = norm(residual), then
        residual = residual_norm(residual) * residual_scale. Without gate: down(activation(up(x)))"""

    @abstractmethod
    def experts(self, weights: ExpertsWeights) -> None:
        """residual += post_norm(the weighted sum of the experts that the router chooses for each token, and the shared
        expert times its gate), each as in `mlp`; all of them read norm(residual). With a dense layer: residual =
        (residual + sum_norm(post_norm(that sum) + the dense layer's post_norm(...)) * residual_multiplier) *
        residual_scale."""

    @abstractmethod
    def parallel(self, attention: AttentionWeights, mlp: MlpWeights) -> None:
        """Both of the above, from the residual before either. If the feed-forward layer has no norm, attention's."""

    def pool(self, norm: Norm | None) -> None:
        """Leaves the residual to who pools it after this norm. Ends the program of a model that does not generate; only
        back ends with `Feature.NO_HEAD` have it."""
        raise NotImplementedError("this back end ends programs with an LM head only")

    @abstractmethod
    def sample(self, head: Head) -> None:
        """ids = sample(head(norm(residual)) * logit_scale), for the tokens to sample. Ends the program."""
