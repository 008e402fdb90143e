"""Config files of models whose layers differ, and of others of 2026: what is read by layer, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.rope import ProportionalRope, Rope
from pipeline.stages.execute.models.features import TRITON, missing
from pipeline.stages.prepare.sources.config_json import ConfigReader
from pipeline.stages.prepare.sources.source import ModelError

SIZES = {
    "vocab_size": 608,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
FULL, SLIDING = "full_attention", "sliding_attention"


def read(kind: str, **changes: Any) -> ModelConfig:
    config = {key: value for key, value in {**SIZES, **changes}.items() if value is not None}
    return ConfigReader(Path("config.json"), {"model_type": kind, **config}).model("tiny", [], {})


def test_the_defaults_of_laguna() -> None:
    config = read("laguna", layer_types=[FULL, *4 * [SLIDING]], num_attention_heads_per_layer=[4, 2, 6, 4, 8])
    assert [config.heads_of(layer).num for layer in range(5)] == [4, 2, 6, 4, 8]
    assert config.query_size == 8 * 32
    assert (config.rotary_dim, config.rope_of(0)) == (16, Rope(500000.0))
    assert config.rope_of(1) == Rope(10000.0, dim=32)
    assert config.gate_per_head
    assert config.gate_function == "softplus"
    assert config.experts is not None
    assert config.experts.layers == [1, 2, 3, 4]
    assert config.differs_by_layer


def test_the_defaults_of_lfm3() -> None:
    config = read("lfm3")
    assert config.short_conv is not None
    assert (config.short_conv.layers, config.short_conv.taps) == ([0, 1, 3], 7)
    assert (config.sliding_layers, config.sliding_window) == ([4], 256)
    assert config.rope_of(2) == Rope(1000000.0, ProportionalRope(part=0.5))
    assert config.rope_of(4) == Rope(10000.0)
    assert config.post_norms
    assert config.gate_per_head


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("laguna", {"gating": "per-row"}, 'gating is .per-row.; it must be true, "per-head" or "per-element"'),
        ("laguna", {"gating": False, "attention_bias": True}, "attention_bias is true: biases are not supported with"),
        ("laguna", {"moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input is true"),
        (
            "laguna",
            {"num_attention_heads_per_layer": [4, 3, 4, 4, 4]},
            "num_attention_heads_per_layer is .* 5 multiples",
        ),
        ("laguna", {"num_attention_heads_per_layer": [4]}, "num_attention_heads_per_layer is .* it must be a list of"),
        ("laguna", {"mlp_layer_types": 5 * ["dense"]}, "mlp_layer_types is .* not all dense"),
        ("laguna", {"moe_router_logit_softcapping": -1.0}, "moe_router_logit_softcapping is -1.0; it must be a finite"),
        ("lfm3", {"conv_bias": True}, "conv_bias is true: a convolution with biases is not supported"),
        ("lfm3", {"conv_L_cache": 9}, "conv_L_cache is 9; it must be an integer from 2 to 8"),
        ("lfm3", {"layer_types": [FULL]}, "layer_types is .* it must be a list of num_hidden_layers = 5"),
        ("lfm2", {"layer_types": [SLIDING, *4 * [FULL]]}, "layer_types is .* each one of full_attention, conv"),
        (
            "apertus",
            {"hidden_act": "relu2"},
            "hidden_act is .relu2.: an Apertus with another activation is not supported",
        ),
    ],
    ids=str,
)
def test_what_is_refused(kind: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=f"(?i){words}"):
        read(kind, **changes)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("apertus", "the activation xIELU"),
        ("laguna", "a gate of attention's heads, or softplus of it"),
        ("lfm3", "short convolutions"),
        ("muse_glimmer_text", "an epsilon of the norms after each half of a layer"),
    ],
)
def test_gpus_refuse_them_by_name(kind: str, words: str) -> None:
    assert words in (missing(read(kind), TRITON) or "")
