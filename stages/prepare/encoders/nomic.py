"""Nomic BERT and GTE: BERT's norms, rotary embeddings and gated feed-forward layers. transformers 5 has other names for
their tensors in memory, and writes those of the hub."""

from collections.abc import Mapping
from typing import Any

from pipeline.runtime.model.architecture_names import Architecture
from pipeline.runtime.model.model_config import Layout, ModelConfig, Piece
from pipeline.runtime.model.rope import LinearRope
from pipeline.stages.prepare.encoders.bert import POST_NORM
from pipeline.stages.prepare.encoders.heads import BERT_HEADS
from pipeline.stages.prepare.families.architecture import HfArchitecture, qkv_slices, renamed
from pipeline.stages.prepare.families.keys import ConfigFault, Keys
from pipeline.stages.prepare.files import shown

NOMIC_ALIASES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}
"""The keys of files with code of their own."""


def _nomic(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    keys.refuse_unless("activation_function", "swiglu", what="another activation")
    keys.refuse_unless("prenorm", False, what="norms before each half of a layer")
    keys.refuse_unless("parallel_block", False, what="parallel halves of layers")
    keys.refuse_unless("use_rms_norm", False, what="RMS norms")
    keys.refuse_unless("rotary_emb_fraction", 1, what="partial rotary embedding")
    keys.refuse_unless("rotary_emb_interleaved", False, what="interleaved rotary embedding")
    keys.refuse_unless("rotary_emb_scale_base", what="a scale base")
    for key in ("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"):
        keys.refuse_unless(key, False, what="a bias")
    keys.refuse_unless("moe_every_n_layers", 0, what="a mixture of experts")
    # Beyond, the model's own code changes the frequencies with the length of a text.
    trained = keys.count("max_trained_positions", model.max_position)
    return {"token_types": keys.count("type_vocab_size", 2, least=0), "max_position": min(model.max_position, trained)}


def _outside(base: str, norm: str = "embeddings.LayerNorm") -> dict[str, Piece]:
    return renamed(
        model__embed_tokens=f"{base}.embeddings.word_embeddings",
        model__embed_token_types=f"{base}.embeddings.token_type_embeddings",
        model__embed_norm=f"{base}.{norm}",
    )


def _nomic_layout(model: ModelConfig) -> Layout:
    pieces = renamed(
        self_attn__o_proj="attn.out_proj",
        self_attn_residual_norm="norm1",
        mlp__gate_proj="mlp.fc12",
        mlp__up_proj="mlp.fc11",
        mlp__down_proj="mlp.fc2",
        mlp_residual_norm="norm2",
    )
    return Layout(
        "nomic_bert.encoder.layers.{}.", _outside("nomic_bert", "emb_ln") | pieces | qkv_slices(model, "attn.Wqkv")
    )


def _gte(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    keys.refuse_unless("position_embedding_type", "rope", what="another kind of positions")
    keys.refuse_unless("layer_norm_type", "layer_norm", what="another norm")
    keys.refuse_unless("logn_attention_scale", False, what="a scale of attention by the length of texts")
    keys.refuse_unless("pack_qkv", True, what="separate queries, keys and values")
    fields: dict[str, Any] = {"token_types": keys.count("type_vocab_size", 1, least=0)}
    if (scaling := keys.get(NTK, dict)) is not None:
        factor = scaling.get("factor")
        if not isinstance(factor, int | float) or isinstance(factor, bool) or not factor > 0 or "mixed_b" in scaling:
            raise ConfigFault(f"rope_scaling is {shown(scaling)}; it must have a positive factor, and no mixed_b")
        if factor > 1:  # as in the model's own code, which scales positions beyond max_position_embeddings only
            # https://kexue.fm/archives/9706
            fields["rope_theta"] = model.rope_theta * factor
            fields["rope_scaling"] = LinearRope(float(factor) ** (2 / model.head_dim))
    return fields


NTK = "ntk_rope_scaling"
"""Where `_without_ntk` leaves it."""


def _without_ntk(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with a scaling of the type "ntk", which other architectures don't have, under a key of its own."""
    scaling = config.get("rope_scaling")
    if not isinstance(scaling, dict) or scaling.get("type", scaling.get("rope_type")) != "ntk":
        return dict(config)
    return {**config, "rope_scaling": None, NTK: scaling}


def _gte_layout(model: ModelConfig, base: str = "gte") -> Layout:
    pieces = renamed(
        self_attn__o_proj="attention.o_proj", self_attn_residual_norm="attn_ln", mlp_residual_norm="mlp_ln"
    )
    inner = model.intermediate_size
    up_gate = {
        "mlp.up_proj": Piece("mlp.up_gate_proj", end=inner),
        "mlp.gate_proj": Piece("mlp.up_gate_proj", begin=inner, end=2 * inner),
    }
    stacked = qkv_slices(model, "attention.qkv_proj") | up_gate
    return Layout(f"{base}.encoder.layer.{{}}.", _outside(base) | pieces | stacked)


def _new_layout(model: ModelConfig) -> Layout:
    return _gte_layout(model, "new")


GATED = {**POST_NORM, "gated": True}
GTE = {**GATED, "qkv_bias": True, "out_bias": True, "mlp_bias": False, "down_bias": True}
GTE_DEFAULTS = {"hidden_act": "gelu", "rms_norm_eps": 1e-12, "max_position_embeddings": 8192}

ARCHITECTURES: dict[Architecture, HfArchitecture] = {
    "nomic_bert": HfArchitecture(
        class_name="NomicBertModel",
        models="Nomic Embed",
        keys={"rms_norm_eps": "layer_norm_eps"},
        aliases=NOMIC_ALIASES,
        defaults={"hidden_act": "silu", "rms_norm_eps": 1e-12, "max_position_embeddings": 2048, "rope_theta": 1000.0},
        always={**GATED, "qkv_bias": False, "out_bias": False, "mlp_bias": False},
        fields=_nomic,
        layout=_nomic_layout,
        heads=BERT_HEADS,
    ),
    "gte": HfArchitecture(
        class_name="GteModel",
        models="GTE",
        keys={"rms_norm_eps": "layer_norm_eps"},
        defaults={**GTE_DEFAULTS, "rope_theta": 160000.0},
        always=GTE,
        fields=_gte,
        layout=_gte_layout,
        other_layouts=(_new_layout,),
        heads=BERT_HEADS,
    ),
    "new": HfArchitecture(
        class_name="NewModel",
        models="GTE multilingual, v1.5",
        keys={"rms_norm_eps": "layer_norm_eps"},
        defaults=GTE_DEFAULTS,
        always=GTE,
        adapt=_without_ntk,
        fields=_gte,
        layout=_new_layout,
        heads=BERT_HEADS,
    ),
}
