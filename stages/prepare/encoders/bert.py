"""BERT, RoBERTa, XLM-RoBERTa, CamemBERT and DistilBERT."""

from typing import Any

from pipeline.runtime.model.architecture_names import Architecture
from pipeline.runtime.model.model_config import Layout, ModelConfig
from pipeline.stages.prepare.encoders.heads import (
    BERT_HEADS,
    CLASSIFIER,
    ROBERTA_HEADS,
    SEQUENCE,
    TOKEN_HEAD,
    TOKENS,
    Head,
    HeadModule,
)
from pipeline.stages.prepare.families.architecture import LAYER_NORM, HfArchitecture, renamed
from pipeline.stages.prepare.families.keys import Keys

POST_NORM = {**LAYER_NORM, "causal": False, "pre_norms": False, "residual_norms": True, "embedding_norm": True}
"""Norms of embeddings, and of the residual after each sum."""
BERT = {**POST_NORM, "qkv_bias": True, "out_bias": True, "mlp_bias": True, "gated": False, "rotary_dim": 0}
KEYS = {"rms_norm_eps": "layer_norm_eps"}
DEFAULTS = {
    "hidden_act": "gelu",
    "rms_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "pad_token_id": 1,
}
LAYERS = renamed(
    self_attn__q_proj="attention.self.query",
    self_attn__k_proj="attention.self.key",
    self_attn__v_proj="attention.self.value",
    self_attn__o_proj="attention.output.dense",
    self_attn_residual_norm="attention.output.LayerNorm",
    mlp__up_proj="intermediate.dense",
    mlp__down_proj="output.dense",
    mlp_residual_norm="output.LayerNorm",
)


def refuse_decoders(keys: Keys) -> None:
    """Raise ConfigFault for BERTs that are no encoders, or whose positions are no table."""
    keys.refuse_unless("position_embedding_type", "absolute", what="an embedding of relative positions")
    keys.refuse_unless("is_decoder", False, what="a decoder of this kind")
    keys.refuse_unless("add_cross_attention", False, what="cross-attention")


def embeddings(base: str) -> dict[str, Any]:
    """The tensors outside of layers."""
    return renamed(
        model__embed_tokens=f"{base}.embeddings.word_embeddings",
        model__embed_positions=f"{base}.embeddings.position_embeddings",
        model__embed_token_types=f"{base}.embeddings.token_type_embeddings",
        model__embed_norm=f"{base}.embeddings.LayerNorm",
    )


def _bert(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    refuse_decoders(keys)
    return {"position_embeddings": model.max_position, "token_types": keys.count("type_vocab_size")}


def positions_after_padding(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    """The table of learned positions has unused rows up to that of the padding token's id, in fairseq's way. Raises
    ConfigFault if no row is left."""
    offset = keys.count("pad_token_id", least=0) + 1
    if offset >= model.max_position:
        raise keys.fault("pad_token_id", f"less than {keys.name('max_position_embeddings')} - 1")
    return {
        "position_embeddings": model.max_position,
        "position_offset": offset,
        "max_position": model.max_position - offset,
    }


def _roberta(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    refuse_decoders(keys)
    return {**positions_after_padding(keys, model), "token_types": keys.count("type_vocab_size")}


def _distilbert(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    return {"position_embeddings": model.max_position}


def _layout(base: str) -> Any:
    return lambda model: Layout(f"{base}.encoder.layer.{{}}.", embeddings(base) | LAYERS)


def _distilbert_layout(model: ModelConfig) -> Layout:
    pieces = renamed(
        self_attn__q_proj="attention.q_lin",
        self_attn__k_proj="attention.k_lin",
        self_attn__v_proj="attention.v_lin",
        self_attn__o_proj="attention.out_lin",
        self_attn_residual_norm="sa_layer_norm",
        mlp__up_proj="ffn.lin1",
        mlp__down_proj="ffn.lin2",
        mlp_residual_norm="output_layer_norm",
    )
    return Layout("distilbert.transformer.layer.{}.", embeddings("distilbert") | pieces)


DISTILBERT_HEADS = {
    SEQUENCE: lambda keys: Head(
        "cls", (HeadModule(name="pre_classifier", outputs="hidden_size", activation="relu"), CLASSIFIER)
    ),
    TOKENS: lambda keys: TOKEN_HEAD,
}


def _roberta_like(class_name: str, models: str = "") -> HfArchitecture:
    return HfArchitecture(
        class_name=class_name,
        models=models,
        keys=KEYS,
        defaults=DEFAULTS,
        always=BERT,
        fields=_roberta,
        layout=_layout("roberta"),
        heads=ROBERTA_HEADS,
    )


ARCHITECTURES: dict[Architecture, HfArchitecture] = {
    "bert": HfArchitecture(
        class_name="BertModel",
        models="BERT, MiniLM, BGE, E5",
        keys=KEYS,
        defaults=DEFAULTS,
        always=BERT,
        fields=_bert,
        layout=_layout("bert"),
        heads=BERT_HEADS,
    ),
    "roberta": _roberta_like("RobertaModel", "RoBERTa"),
    "xlm-roberta": _roberta_like("XLMRobertaModel", "BGE-M3, E5"),
    "camembert": _roberta_like("CamembertModel", "CamemBERT"),
    "distilbert": HfArchitecture(
        class_name="DistilBertModel",
        models="DistilBERT",
        keys={
            "hidden_size": "dim",
            "intermediate_size": "hidden_dim",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "hidden_act": "activation",
        },
        aliases={"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
        defaults={"hidden_act": "gelu", "max_position_embeddings": 512},
        always={**BERT, "rms_norm_eps": 1e-12},
        fields=_distilbert,
        layout=_distilbert_layout,
        heads=DISTILBERT_HEADS,
    ),
}
