"""Transformers: Llama and every decoder or encoder that is a variation of it.

Their differences (kinds and places of norms, activations, parallel layers, biases, rotary embeddings, windows, factors)
are fields of `ModelConfig`; the code never checks a model's name. Back ends read the fields that concern only how an op
computes, such as `norm` and `activation`, themselves.

embedding → layers × (norm → attention → + → norm → feed-forward → +) → norm → logits of the sampled tokens

A feed-forward layer may be a mixture of experts. With `parallel`, it reads the same hidden states as attention:

embedding → layers × (norm → attention, norm → feed-forward → + both) → norm → logits of the sampled tokens

Inputs of a token for each layer (per-layer embeddings) are made after the embedding, and added after the feed-forward
layer. What a vision tower makes besides embeddings (DeepStack) is added behind the first layers. Some layers may have a
recurrent state in place of attention (gated DeltaNet, short convolutions). A model that does not generate ends with the
last norm; BERT has none, but norms of the residual after each sum.
"""

import numpy as np

from pipeline.errors import UserError
from pipeline.kernels.stored_matrix import StoredMatrix
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.layers.attention import attention_weights
from pipeline.stages.execute.layers.experts import experts_weights
from pipeline.stages.execute.layers.mlp import mlp_weights
from pipeline.stages.execute.layers.norm import norm_weights, plain_norm
from pipeline.stages.execute.layers.per_layer import per_layer_weights, token_inputs
from pipeline.stages.execute.layers.recurrent import recurrent_weights
from pipeline.stages.execute.program import AnyMatrix, Embedding, Head, ProgramBuilder
from pipeline.stages.execute.ranks.layer_split import Part
from pipeline.stages.execute.weights import Weights


def build(config: ModelConfig, weights: Weights, program: ProgramBuilder, part: Part) -> None:
    """Record the forward pass of a part of a model: the stage of a pipeline before the part computes the hidden states
    that it begins with. Raises UserError if a tensor is missing or has the wrong shape."""
    hidden, vocab_size = config.hidden_size, config.vocab_size
    if not part.is_first and part.layers.start < program.num_encoded_layers:
        raise UserError(
            f"execute.pipeline_parallel: images change what is behind the first {program.num_encoded_layers} layers of "
            f"{config.name}, but the first stage has fewer; set execute.pipeline_layers, or limits.max_images to 0"
        )
    table = None
    if part.is_first or (part.is_last and config.tie_embeddings):
        table = weights.matrix("model.embed_tokens.weight", vocab_size, hidden)
    program.embed(_embedding(config, weights, table) if part.is_first and table is not None else None)
    if config.per_layer_inputs is not None:
        program.token_inputs(token_inputs(config, weights))
    for i in part.layers:
        _layer(config, weights, program, i)
        if i < program.num_encoded_layers:
            program.add_encoded(i)
    if not part.is_last:
        return
    if not config.generates:
        program.pool(None if config.residual_norms else norm_weights(config, weights, "model.norm"))
        return
    tied = table if config.tie_embeddings else None
    head = weights.matrix("lm_head.weight", vocab_size, hidden) if tied is None else tied
    bias = weights.vector("lm_head.bias", vocab_size) if config.head_bias else None
    program.sample(Head(norm_weights(config, weights, "model.norm"), head, bias))


def _layer(config: ModelConfig, weights: Weights, program: ProgramBuilder, i: int) -> None:
    if config.parallel:
        program.parallel(attention_weights(config, weights, i), mlp_weights(config, weights, i))
        return
    if config.is_recurrent(i):
        program.recurrent(recurrent_weights(config, weights, i))
    else:
        program.attention(attention_weights(config, weights, i))
    if config.has_experts(i):
        program.experts(experts_weights(config, weights, i))
    else:
        program.mlp(mlp_weights(config, weights, i))
    if config.per_layer_inputs is not None:
        program.per_layer(per_layer_weights(config, weights, i))


def _embedding(config: ModelConfig, weights: Weights, table: AnyMatrix) -> Embedding:
    rows = config.position_embeddings
    if config.token_types:
        positions: AnyMatrix | None = _positions_of_types(config, weights)
    else:
        positions = weights.matrix("model.embed_positions.weight", rows, config.hidden_size) if rows else None
    norm = None
    if config.embedding_norm:
        has_weights = config.embedding_norm_weights
        norm = norm_weights(config, weights, "model.embed_norm") if has_weights else plain_norm(config)
    return Embedding(table, positions, norm)


USED_TYPES = 2
"""A text has type 0, the second one of a pair type 1."""


def _positions_of_types(config: ModelConfig, weights: Weights) -> StoredMatrix:
    """The learned positions for each token type that is used, or the types alone: [types x position_embeddings,
    hidden_size]."""
    num, rows, hidden = min(config.token_types, USED_TYPES), config.position_embeddings, config.hidden_size
    table = weights.floats("model.embed_token_types.weight", (config.token_types, hidden))[:num]
    if rows:
        positions = weights.floats("model.embed_positions.weight", (rows, hidden))
        table = (table[:, None] + positions).reshape(num * rows, hidden)
    return StoredMatrix("f32", np.ascontiguousarray(table), len(table), hidden)
