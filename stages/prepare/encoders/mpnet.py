"""MPNet, whose scores have biases by distance."""

from typing import Any

from pipeline.runtime.model.architecture_names import Architecture
from pipeline.runtime.model.model_config import Layout, ModelConfig
from pipeline.stages.prepare.encoders.bert import BERT, DEFAULTS, KEYS, embeddings, positions_after_padding
from pipeline.stages.prepare.encoders.heads import ROBERTA_HEADS
from pipeline.stages.prepare.families.architecture import HfArchitecture, renamed
from pipeline.stages.prepare.families.keys import Keys

BUCKETS = 32
"""transformers computes with this number, whatever the config says."""


def _mpnet(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    keys.refuse_unless("relative_attention_num_buckets", BUCKETS, what="another number of buckets")
    keys.refuse_unless("pad_token_id", 1, what="another padding token")
    return {**positions_after_padding(keys, model), "distance_buckets": BUCKETS}


def _layout(model: ModelConfig) -> Layout:
    pieces = renamed(
        model__distance_bias="mpnet.encoder.relative_attention_bias",
        self_attn__q_proj="attention.attn.q",
        self_attn__k_proj="attention.attn.k",
        self_attn__v_proj="attention.attn.v",
        self_attn__o_proj="attention.attn.o",
        self_attn_residual_norm="attention.LayerNorm",
        mlp__up_proj="intermediate.dense",
        mlp__down_proj="output.dense",
        mlp_residual_norm="output.LayerNorm",
    )
    return Layout("mpnet.encoder.layer.{}.", embeddings("mpnet") | pieces)


ARCHITECTURES: dict[Architecture, HfArchitecture] = {
    "mpnet": HfArchitecture(
        class_name="MPNetModel",
        models="MPNet",
        keys=KEYS,
        defaults=DEFAULTS,
        always=BERT,
        fields=_mpnet,
        layout=_layout,
        heads=ROBERTA_HEADS,
    ),
}
