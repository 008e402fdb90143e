"""Decides whether a checkpoint's LM head is the embedding, by its tensors first and its config.json second.

As in transformers (`PreTrainedModel.tie_weights`): `tie_word_embeddings` only says what a missing tensor is. If both
are stored and differ, both are used. If only the head is stored, it is the embedding too.
"""

from collections.abc import Iterable

import msgspec

from pipeline.runtime.model.model_config import Layout, ModelConfig, Piece
from pipeline.stages.prepare.weights.tensors import STORED, Found, same_bytes

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
WEIGHTS = ("weight", "qweight", "weight_packed", "weight_blocks")
"""Last parts of the names of a matrix, in checkpoints of floats and in quantized ones."""


def with_head_of(config: ModelConfig, found: Found) -> tuple[ModelConfig, list[str]]:
    """The config with the head of the files, and lines about what config.json did not say. `config.tie_embeddings` is
    what config.json says. Reads both matrices if they may be equal."""
    if not config.tie_embeddings:
        return config, []
    layout = config.layout
    head, table = (_stored(module, layout, found) for module in (HEAD, EMBEDDING))
    if head is None:
        return config, []
    if table is None:
        tensor = head.rpartition(".")[0]
        swapped = Layout(layout.layers, {**layout.pieces, EMBEDDING: Piece(tensor)}, layout.experts)
        line = f"the weights have {head}, but no embedding: it is both, because tie_word_embeddings is true"
        return msgspec.structs.replace(config, layout=swapped), [line]
    if found[head][1].dtype in STORED and same_bytes(found[head], found[table]):
        return config, []
    line = (
        f"the LM head is {head}, which differs from {table}, although tie_word_embeddings is true (or absent, which "
        "means the same here)"
    )
    return msgspec.structs.replace(config, tie_embeddings=False), [line]


def _stored(module: str, layout: Layout, names: Iterable[str]) -> str | None:
    """The tensor with the matrix of a module; None if there is none."""
    tensor = layout.find(f"{module}.weight")[1].tensor
    return next((name for kind in WEIGHTS if (name := f"{tensor}.{kind}") in names), None)
