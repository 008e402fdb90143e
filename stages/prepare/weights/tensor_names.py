"""Finds out which of the known names a checkpoint's tensors have, and changes the model's layout to them.

transformers loads a folder whatever class saved it: it adds or removes the prefix of the base model (`model.`,
`transformer.`, `gpt_neox.`) of each name, and knows the names that models for texts and images had in several versions
(`rename_source_key` in core_model_loading.py, and conversion_mapping.py there).
"""

from collections.abc import Collection, Container, Iterable

import msgspec

from pipeline.runtime.model.model_config import EXPERTS, Layout, ModelConfig, Piece
from pipeline.stages.prepare.architectures import architecture_of
from pipeline.stages.prepare.families.architecture import TEXT_PREFIX

OUTSIDE = (
    *("model.embed_tokens", "model.embed_positions", "model.embed_token_types", "model.embed_norm", "model.norm"),
    *("model.distance_bias", "lm_head"),
    *("model.per_layer_embeddings", "model.per_layer_projection", "model.per_layer_norm"),
)
"""Llama's names of the modules that are not in a layer."""

TEXT_MODEL = f"{TEXT_PREFIX}model."
"""Prefix of a text model that is a part of another one, in the files that transformers writes."""
TEXT_MODELS = ("model.language_model.", TEXT_PREFIX, "model.language_model.model.", "model.text_model.", "text_model.")
"""Other prefixes of it: in memory since transformers 4.52, of a model that was saved without its head, and of both; and
those of Idefics."""

OTHER_HEADS = {"embed_out": "lm_head"}
"""GPT-NeoX has either name."""

OTHER_NORMS = {
    "attention_layer_norm": "input_layernorm",
    "feedforward_layer_norm": "post_attention_layernorm",
    "post_attention_layernorm": "feedforward_layer_norm",
}
"""Other names of OLMo hybrid's norms: in transformers, and where it saved them under the names of other layers."""

FUSED = "mlp.experts.gate_up_proj"
"""Gate and up of all experts, where a tensor has those of all: transformers' own form since version 5."""


def is_part(layout: Layout) -> bool:
    """Whether the model is the text model of one for texts and images. Qwen2-VL's names may be Llama's, which only the
    layout of a part (`as_part`) has pieces for."""
    embedding = layout.pieces.get("model.embed_tokens")
    has_llama_s = embedding is not None and embedding.tensor == "model.embed_tokens"
    return has_llama_s or layout.layers.startswith((TEXT_PREFIX, *TEXT_MODELS))


def with_layout_of(config: ModelConfig, names: Collection[str]) -> ModelConfig:
    """The config with the layout of the architecture's writer whose tensors have these names."""
    for layout in (None, *architecture_of(config.architecture).other_layouts):
        other = config if layout is None else msgspec.structs.replace(config, layout=layout(config))
        found = with_names_of(other, names)
        if found.layout.find("model.layers.0.self_attn.o_proj.weight")[0] in names:
            return found
    return with_names_of(config, names)


def with_names_of(config: ModelConfig, names: Iterable[str]) -> ModelConfig:
    """The config with the layout of the files whose tensors have these names. Names that no file has stay as they
    are. As in transformers, `LayerNorm` may have `gamma` and `beta`."""
    names = list(names)
    modules = {name.rpartition(".")[0] for name in names}
    gammas = {name for name in names if name.endswith("LayerNorm.gamma")}
    layout = config.layout
    layers = layout.layers
    for candidate in _variants(layers, layout):
        if any(name.startswith(candidate.format(0)) for name in names):
            layers = candidate
            break
    pieces = dict(layout.pieces)
    for module in OUTSIDE:
        piece = layout.pieces.get(module) or Piece(module)
        stored = next((name for name in _variants(piece.tensor, layout) if name in modules), piece.tensor)
        if stored != piece.tensor:
            pieces[module] = msgspec.structs.replace(piece, tensor=stored)
    for part, piece in layout.pieces.items():
        other = OTHER_NORMS.get(piece.tensor)
        if other is not None and not any(module.endswith(f".{piece.tensor}") for module in modules):
            pieces[part] = msgspec.structs.replace(piece, tensor=other)
    first = layers.format(0)
    for part, piece in list(pieces.items()):
        if f"{'' if part in OUTSIDE else first}{piece.tensor}.gamma" in gammas:
            pieces[part] = msgspec.structs.replace(piece, as_gamma=True)
    return _with_experts_of(msgspec.structs.replace(config, layout=Layout(layers, pieces, layout.experts)), set(names))


def _variants(name: str, layout: Layout) -> list[str]:
    """The names that transformers takes for `name` of the layout, itself first."""
    if is_part(layout):
        if name.startswith(TEXT_MODEL):
            inner = name.removeprefix(TEXT_MODEL)
            return [name, *(f"{prefix}{inner}" for prefix in TEXT_MODELS), f"model.{inner}"]
        inner = name.removeprefix(TEXT_PREFIX)
        return [name, inner, f"model.{inner}"]
    base = layout.layers.partition(".")[0] + "."
    variants = [name, name.removeprefix(base), f"{base}{name}"]
    return [*variants, OTHER_HEADS[name]] if name in OTHER_HEADS else variants


def _with_experts_of(config: ModelConfig, names: Container[str]) -> ModelConfig:
    """The config with the layout of the files, whose tensors may have all experts although those of the family have
    one each. Tensors in MXFP4 have rows of inputs, others of gpt-oss rows of outputs."""
    layout, experts = config.layout, config.experts
    if experts is None:
        return config
    layer = next(layer for layer in range(config.num_layers) if config.has_experts(layer))
    prefix = layout.layers.format(layer)
    if f"{prefix}{FUSED}_blocks" in names:
        as_rows = {name: msgspec.structs.replace(piece, transposed=False) for name, piece in layout.experts.items()}
        return msgspec.structs.replace(config, layout=Layout(layout.layers, layout.pieces, as_rows))
    has_each = all("{}" in piece.tensor for piece in layout.experts.values())
    if not has_each or f"{prefix}{FUSED}" not in names:
        return config
    inner = experts.intermediate_size
    fused = {
        "gate_proj": Piece(FUSED, end=inner, bare=True),
        "up_proj": Piece(FUSED, begin=inner, bare=True),
        "down_proj": Piece(f"{EXPERTS}down_proj", bare=True),
    }
    pieces = layout.pieces | {"mlp.router": Piece("mlp.gate")}
    return msgspec.structs.replace(config, layout=Layout(layout.layers, pieces, fused))
