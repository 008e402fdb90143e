"""What stages know of a model: its sizes, its architecture and where its weights are. In a prepared folder it is
`model.json`."""

from pathlib import Path
from typing import Literal

import msgspec

from pipeline.runtime.model.model_folder import read_file
from pipeline.runtime.model.pooler import Pooler, Task
from pipeline.runtime.model.rope import LongRope, Rope, RopeScaling
from pipeline.runtime.model.special_layers import (
    DeltaNet,
    Eagle3,
    Experts,
    Heads,
    OtherHeads,
    PerLayerInputs,
    ShortConv,
)


class Piece(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where the rows of a matrix or vector are in the weight files: the tensor is `groups` equal groups of rows, and
    the rows from `begin` to `end` of each group are those of this piece, in this order."""

    tensor: str
    """The tensor's name without `.weight` or `.bias`; inside a layer, without `Layout.layers`."""
    groups: int = 1
    begin: int = 0
    end: int | None = None
    """None: to the end of the group."""
    transposed: bool = False
    """Whether the tensor is [inputs, outputs]."""
    bare: bool = False
    """Whether the name of a weight ends without `.weight`, and that of a bias with `_bias`."""
    index: int | None = None
    """The number of the expert if the tensor has those of all experts, [experts, rows, columns]. `Layout.find` sets
    it."""
    as_row: bool = False
    """Whether a vector is stored as a matrix of one row."""
    as_gamma: bool = False
    """Whether weight and bias of a norm are named `gamma` and `beta`, as in files that came from TensorFlow."""

    def name(self, kind: str) -> str:
        """The name of the tensor that holds the "weight" or "bias"."""
        if self.as_gamma:
            return f"{self.tensor}.{'gamma' if kind == 'weight' else 'beta'}"
        if not self.bare:
            return f"{self.tensor}.{kind}"
        return self.tensor if kind == "weight" else f"{self.tensor}_{kind}"


EXPERTS = "mlp.experts."
"""Prefix of the tensors of experts, in a layer."""


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the names and rows of the weight files differ from those of Llama in Hugging Face Transformers."""

    layers: str = "model.layers.{}."
    """Prefix of a layer's tensors; {} is its number."""
    pieces: dict[str, Piece] = {}
    """By Llama's name without `.weight` and `.bias`, for example `self_attn.q_proj` or `lm_head`. Other tensors have
    Llama's names."""
    experts: dict[str, Piece] = {}
    """Of the matrices of experts, by the last part of their names, for example `down_proj`. In a tensor's name, {} is
    the number of the expert. A name without it is that of a tensor with all experts. Other matrices have names like
    `mlp.experts.5.down_proj`."""

    def find(self, name: str) -> tuple[str, Piece]:
        """The tensor in the files that holds the tensor that Llama calls `name`, and its part."""
        module, _, kind = name.rpartition(".")
        if module.startswith("model.layers."):
            _, _, layer, part = module.split(".", 3)
            piece = self._expert_piece(part) or self.pieces.get(part) or Piece(part)
            return f"{self.layers.format(layer)}{piece.name(kind)}", piece
        piece = self.pieces.get(module) or Piece(module)
        return piece.name(kind) if module else name, piece

    def _expert_piece(self, part: str) -> Piece | None:
        """The piece of a matrix of an expert, `mlp.experts.5.down_proj`; None if `part` is another one."""
        if not self.experts or not part.startswith(EXPERTS):
            return None
        number, _, matrix = part.removeprefix(EXPERTS).partition(".")
        piece = self.experts[matrix]
        if "{}" in piece.tensor:
            return msgspec.structs.replace(piece, tensor=piece.tensor.format(number))
        return msgspec.structs.replace(piece, index=int(number))


NormKind = Literal["rms", "layer"]
Activation = Literal["silu", "gelu", "gelu_tanh", "gelu_quick", "relu", "relu2", "swiglu_oai", "xielu"]
GateFunction = Literal["sigmoid", "softplus"]
QkNorm = Literal["head", "each_head", "all"]


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The configuration of a decoder or an encoder. The defaults are Llama's."""

    format: Literal[3] = 3
    name: str
    """The model's name for clients, unless `served_model_name` is set."""
    architecture: str
    """Selects the code that computes the model: an `Architecture`, or that of a package (foreign.py)."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    query_heads: list[int] | None = None
    """Query heads of each layer; None: `num_heads`."""
    other_heads: OtherHeads | None = None
    """The layers with other heads than `num_kv_heads` of `head_dim`."""
    vocab_size: int
    """Number of rows of the embedding."""
    max_position: int
    causal: bool = True
    """Whether a token sees only the tokens up to itself. If not, the model is an encoder: each text is computed whole
    in one step, and nothing is sampled."""
    norm: NormKind = "rms"
    """The kind of all norms of hidden states, and of norms of queries and keys."""
    rms_norm_eps: float
    """Of all norms."""
    post_norm_eps: float | None = None
    """Of `post_norms`, if it is another."""
    norm_weights: bool = True
    """False: norms have neither weights nor biases."""
    norm_bias: bool = False
    norm_offset: float = 0.0
    """What is added to the stored weights of norms: Gemma stores them minus one."""
    last_norm_offset: float | None = None
    """Of the norm before the LM head, if it is another."""
    pre_norms: bool = True
    """Whether hidden states are normalized before attention and before the feed-forward layer."""
    post_norms: bool = False
    """Whether the results of attention and of the feed-forward layer are normalized."""
    residual_norms: bool = False
    """Whether the residual itself is normalized after each sum (BERT). Such models have no norm before the head."""
    skips_first_norm: bool = False
    """Whether attention of the first layer has no norm before it: that of embeddings is in its place (ModernBERT)."""
    parallel: bool = False
    """Whether the feed-forward layer has the same input as attention, not its result."""
    shared_norm: bool = False
    """Whether parallel attention and feed-forward layers share one norm."""
    activation: Activation = "silu"
    gated: bool = True
    """Whether the feed-forward layer multiplies the activation with a second projection."""
    swiglu_alpha: float = 1.702
    """a in gate * sigmoid(a * gate) * (up + 1), which is the activation "swiglu_oai"."""
    swiglu_limit: float = 7.0
    """With "swiglu_oai", the most that gate may be, and the largest magnitude of up; larger ones are clamped."""
    intermediate_sizes: list[int] | None = None
    """Of each layer; None: `intermediate_size`."""
    layer_scales: bool = False
    """Whether the residual is multiplied with a number after each layer."""
    per_layer_inputs: PerLayerInputs | None = None
    experts: Experts | None = None
    delta: DeltaNet | None = None
    short_conv: ShortConv | None = None
    attention_gate: bool = False
    """Whether attention's result is multiplied with a function of a projection of its input."""
    gate_per_head: bool = False
    """Whether there is one such number for each head. Else there is one for each of its dimensions."""
    gate_function: GateFunction = "sigmoid"
    embedding_norm: bool = False
    """Whether embeddings are normalized; after `embedding_scale`."""
    embedding_norm_weights: bool = True
    """Whether that norm has weights."""
    embedding_scale: float = 1.0
    position_embeddings: int = 0
    """Rows of the table of learned positions; 0 if the model has none."""
    position_offset: int = 0
    """The row of position 0."""
    token_types: int = 0
    """Rows of the table of token types; 0 if the model has none. Without types in a request, all tokens have type 0."""
    residual_multiplier: float = 1.0
    """Factor of the results of attention and of the feed-forward layer."""
    query_scale: float | None = None
    """Factor of attention scores; None: head_dim ** -0.5."""
    query_growth: float = 0.0
    """b in 1 + b * log(1 + floor(position / query_growth_period)), a factor of queries; 0 for none."""
    query_growth_period: int = 1
    attention_softcap: float | None = None
    """c in c * tanh(score / c)."""
    alibi_slopes: list[float] | None = None
    """For each head, what is subtracted from a score for each position that a key is before the query."""
    distance_buckets: int = 0
    """Buckets of distances between query and key, each with a bias of the scores of each head (T5, MPNet); 0: none."""
    sinks: bool = False
    """Whether each query head has a learned score that takes part in the softmax, without a key (attention sinks: Xiao
    et al., 2023, arXiv:2309.17453)."""
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    head_bias: bool = False
    """Whether the LM head has a bias."""
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    rotary_dim: int | None = None
    """The first dimensions of a head that are rotated; None: all."""
    rope_axes: list[int] | None = None
    """For each pair of dimensions that rotate, by which coordinate of a token: 0 its frame, 1 its line and 2 its column
    in an image (M-RoPE: Wang et al., 2024, arXiv:2409.12191). Tokens of text have their position in all. None: all
    pairs rotate by the position."""
    interleaved_rope: bool = False
    """Whether adjacent dimensions rotate together, in the stored order. If not, halves do."""
    sliding_rope: Rope | None = None
    """The rotary embedding of layers with a sliding window, if they have another one."""
    layers_without_rope: list[int] = []
    sliding_window: int | None = None
    """Number of positions that attention sees, including its own; None: all up to its own. If attention is not causal,
    as many positions after it are seen as before it."""
    sliding_layers: list[int] | None = None
    """The layers with the window; None: all layers."""
    tie_embeddings: bool
    qkv_bias: bool = False
    """Whether the projections of queries, keys and values have biases."""
    out_bias: bool = False
    """Whether attention's output projection has a bias."""
    mlp_bias: bool = False
    down_bias: bool | None = None
    """Whether the second matrix of the feed-forward layer has a bias; None: as the first."""
    qk_norm: bool = False
    """Whether queries and keys are normalized before RoPE."""
    qk_norm_kind: QkNorm = "head"
    """"head": each head by itself, with weights [head_dim]; "each_head": with weights for each head [num_heads *
    head_dim]; "all": all heads together, with such weights."""
    qk_norm_weights: bool = True
    """False: norms of queries and keys have no weights."""
    value_norm: bool = False
    """Whether each head of values is normalized, by a norm without weights."""
    first_shared_kv_layer: int | None = None
    """From this layer on, layers have no keys and values of their own: each reads those of the last layer before this
    one that has the same kind of attention, with a window or without."""
    eos_ids: list[int]
    bos_id: int | None = None
    add_bos: bool = False
    """Whether the tokenizer's post-processor adds the BOS token; the chat template needs to know."""
    weight_files: list[str]
    layout: Layout = Layout()
    eagle3: Eagle3 | None = None
    """Of an EAGLE-3 head; None for all other models."""
    special_tokens: dict[str, str] | None = None
    """The variables of chat templates that are special tokens, as `bos_token`; None: those of `bos_id` and the first
    of `eos_ids`."""
    split_special_tokens: bool = False
    """Whether special tokens in texts are encoded as plain text, those that the chat template writes too."""
    pooler: Pooler | None = None
    """How the model makes embeddings, scores or labels; None for models that generate text."""
    modules: Layout | None = None
    """The names that the modules have in transformers, and so in adapters; None: those of `layout`."""

    def longest_sequence(self, max_model_len: int) -> int:
        """The longest sequence that a server takes whose setting `max_model_len` has this value, if it has the memory.

        0 is the model's own limit. With LongRoPE it is the original context, as in vLLM: with more, the factors for
        long contexts would change the results of all sequences, short ones too.
        """
        own = self.max_position
        if isinstance(self.rope_scaling, LongRope):
            own = min(own, self.rope_scaling.original_max_position)
        return min(max_model_len or own, self.max_position)

    @property
    def generates(self) -> bool:
        """Whether the model generates text; else it has no LM head."""
        return self.pooler is None

    @property
    def tasks(self) -> tuple[Task, ...]:
        """What the model can be asked for."""
        return ("generate", "embed") if self.pooler is None else self.pooler.tasks

    @property
    def type_rows(self) -> int | None:
        """Rows of each token type in the table of learned positions and types, which has those of the first type, then
        those of the next one. 0: there are no learned positions, and each type has a row. None: a token's row depends
        on its position only."""
        if self.token_types == 0 or (self.token_types == 1 and self.position_embeddings):
            return None
        return self.position_embeddings

    def rope_of(self, layer: int) -> Rope | None:
        """The rotary embedding of a layer; None if it has none."""
        if self.rotary_dim == 0 or layer in self.layers_without_rope:
            return None
        if self.sliding_rope is not None and self.window_of(layer) is not None:
            return self.sliding_rope
        return Rope(self.rope_theta, self.rope_scaling)

    def window_of(self, layer: int) -> int | None:
        """The attention window of a layer; None if it has none."""
        return self.sliding_window if self.sliding_layers is None or layer in self.sliding_layers else None

    def window_after_of(self, layer: int) -> int | None:
        """How many positions after its own a token sees in a layer with a window; None if the window does not say."""
        window = self.window_of(layer)
        return None if self.causal or window is None else window - 1

    def heads_of(self, layer: int) -> Heads:
        """The heads of a layer's attention."""
        other = self.other_heads
        num = self.num_heads if self.query_heads is None else self.query_heads[layer]
        if other is not None and layer in other.layers:
            return Heads(num, other.num_kv_heads, other.head_dim)
        return Heads(num, self.num_kv_heads, self.head_dim)

    @property
    def all_heads(self) -> list[Heads]:
        """The different heads of its layers."""
        return list(dict.fromkeys(self.heads_of(layer) for layer in range(self.num_layers)))

    @property
    def query_size(self) -> int:
        """The queries of a token in the layer that has most."""
        return max(heads.query_size for heads in self.all_heads)

    def values_are_keys(self, layer: int) -> bool:
        """Whether the values of a layer are its projected keys."""
        return self.other_heads is not None and self.other_heads.values_are_keys and layer in self.other_heads.layers

    def kv_source(self, layer: int) -> int:
        """The layer whose keys and values a layer reads: itself, unless it has none of its own."""
        first = self.first_shared_kv_layer
        if first is None or layer < first:
            return layer
        return max(before for before in range(first) if self.window_of(before) == self.window_of(layer))

    @property
    def differs_by_layer(self) -> bool:
        """Whether its layers have different matrices, or some read the keys and values of others."""
        sizes = self.query_heads, self.other_heads, self.intermediate_sizes
        rotated = None if self.sliding_rope is None else self.sliding_rope.dim
        kinds = *sizes, self.first_shared_kv_layer, self.per_layer_inputs, rotated
        return any(kind is not None for kind in kinds)

    def inner_of(self, layer: int) -> int:
        """The intermediate size of the feed-forward layer of a layer."""
        return self.intermediate_size if self.intermediate_sizes is None else self.intermediate_sizes[layer]

    def is_recurrent(self, layer: int) -> bool:
        """Whether a layer has a recurrent state in place of attention."""
        recurrent = self.short_conv if self.delta is None else self.delta
        return recurrent is not None and layer in recurrent.layers

    @property
    def has_states(self) -> bool:
        """Whether some layers have a recurrent state."""
        return self.delta is not None or self.short_conv is not None

    def has_pre_norms(self, layer: int) -> bool:
        """Whether hidden states are normalized before both halves of a layer."""
        return self.pre_norms or self.is_recurrent(layer)

    def has_post_norms(self, layer: int) -> bool:
        """Whether the results of both halves of a layer are normalized."""
        return self.post_norms and (self.delta is None or not self.is_recurrent(layer))

    def has_experts(self, layer: int) -> bool:
        """Whether the feed-forward layer of a layer is a mixture of experts."""
        return self.experts is not None and (self.experts.layers is None or layer in self.experts.layers)

    def has_dense(self, layer: int) -> bool:
        """Whether a layer has a dense feed-forward layer, alone or beside experts."""
        return not self.has_experts(layer) or (self.experts is not None and self.experts.beside_dense)

    @property
    def inner_sizes(self) -> list[int]:
        """The intermediate sizes of the feed-forward layers, without those of experts."""
        dense = [layer for layer in range(self.num_layers) if self.has_dense(layer)]
        sizes = list(dict.fromkeys(self.inner_of(layer) for layer in dense))
        shared = self.experts.shared_intermediate_size if self.experts is not None else 0
        return [*sizes, shared] if shared else sizes

    @classmethod
    def load(cls, folder: str | Path) -> "ModelConfig":
        """Read `model.json`. Raises FileNotFoundError or msgspec.ValidationError; either is a bug in prepare."""
        return msgspec.json.decode(read_file(Path(folder) / "model.json"), type=cls)

    def save(self, folder: str | Path) -> None:
        (Path(folder) / "model.json").write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2))

    def weight_paths(self, folder: str | Path) -> list[Path]:
        return [Path(folder) / name for name in self.weight_files]
