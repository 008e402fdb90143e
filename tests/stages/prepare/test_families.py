"""A config.json of each family is read as transformers reads it."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.prepare.sources.config_json import ConfigReader
from pipeline.stages.prepare.sources.source import ModelError

SIZES = {
    "vocab_size": 608,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 9,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FULL, LOCAL = "full_attention", "sliding_attention"


def read(config: dict[str, Any]) -> ModelConfig:
    """Shapes are checked before the weights are read."""
    return ConfigReader(Path("config.json"), config).model("tiny", [], {})


def kinds_of(config: ModelConfig) -> list[str]:
    return [FULL if config.window_of(layer) is None else LOCAL for layer in range(config.num_layers)]


def theirs(folder: Path, config: dict[str, Any]) -> Any:
    (folder / "config.json").write_text(json.dumps(config))
    return AutoConfig.from_pretrained(folder)


@pytest.mark.parametrize(
    ("kind", "is_read"),
    [
        ("gemma3_text", True),
        ("cohere2", True),
        ("exaone4", True),
        ("gemma2", False),
        ("olmo3", False),
        ("ministral", False),
    ],
)
def test_a_pattern_of_windows_is_read_only_by_those_that_have_the_key(tmp_path: Path, kind: str, is_read: bool) -> None:
    plain = {**SIZES, "model_type": kind, "sliding_window": 21}
    config = {**plain, "sliding_window_pattern": 5}
    found = kinds_of(read(config))
    assert found == theirs(tmp_path, config).layer_types
    assert (found != kinds_of(read(plain))) == is_read


def test_ministral_3_has_windows_in_every_layer_whatever_the_pattern() -> None:
    config = {**SIZES, "model_type": "ministral3", "sliding_window": 21, "sliding_window_pattern": 2}
    assert kinds_of(read(config)) == [LOCAL] * 9


EXAONE = {**SIZES, "model_type": "exaone4", "sliding_window": 21}


def test_a_map_of_exaone_4_repeats_and_its_last_layer_is_full() -> None:
    """As its documentation says; transformers requires `layer_types` beside a map."""
    found = kinds_of(read({**EXAONE, "sliding_window_pattern": "LLG"}))
    assert found == [LOCAL, LOCAL, FULL] * 3
    found = kinds_of(read({**EXAONE, "sliding_window_pattern": "LLLG"}))
    assert found == [*[LOCAL, LOCAL, LOCAL, FULL] * 2, FULL]


def test_layer_types_win_over_a_map(tmp_path: Path) -> None:
    """EXAONE 4.0 32B has both."""
    kinds = [LOCAL, FULL, *[LOCAL] * 7]
    config = {**EXAONE, "sliding_window_pattern": "LLLG", "layer_types": kinds}
    assert kinds_of(read(config)) == theirs(tmp_path, config).layer_types == kinds


@pytest.mark.parametrize("pattern", ["", "LXG", 0, -1, True, 2.5, ["L"]])
def test_another_pattern_is_an_error_that_names_the_key(pattern: object) -> None:
    with pytest.raises(ModelError, match=r"sliding_window_pattern is .*; it must be a positive integer, or a string"):
        read({**EXAONE, "sliding_window_pattern": pattern})


@pytest.mark.parametrize(
    ("changes", "rotated"),
    [
        ({"sliding_window": 21}, [0, 1, 2, 4, 5, 6, 8]),
        ({"sliding_window": 21, "layer_types": [FULL] * 9}, []),
        ({"layer_types": [FULL] * 9}, []),
        ({"sliding_window": None, "layer_types": [FULL] * 9}, [*range(9)]),
    ],
)
def test_layers_of_exaone_4_rotate_by_the_window_of_the_config(changes: dict[str, Any], rotated: list[int]) -> None:
    """`if self.sliding_window is None or self.is_sliding` in transformers; 4096 is the default."""
    config = read({**SIZES, "model_type": "exaone4", **changes})
    assert [layer for layer in range(9) if config.rope_of(layer) is not None] == rotated


@pytest.mark.parametrize("kind", ["gemma", "gemma2", "gemma3_text"])
def test_gelu_means_its_approximation_only_in_gemma_1(tmp_path: Path, kind: str) -> None:
    key = "hidden_act" if kind == "gemma" else "hidden_activation"
    config = {**SIZES, "model_type": kind, key: "gelu", "sliding_window": 21}
    expected = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}[getattr(theirs(tmp_path, config), key)]
    assert read(config).activation == expected == ("gelu_tanh" if kind == "gemma" else "gelu")


def test_a_soft_cap_of_attention_scores_is_read_in_gemma_2_and_refused_in_gemma_3() -> None:
    config = {**SIZES, "model_type": "gemma3_text", "attn_logit_softcapping": 30.0}
    assert read({**config, "model_type": "gemma2"}).attention_softcap == 30.0
    assert read({**config, "attn_logit_softcapping": None}).attention_softcap is None
    with pytest.raises(ModelError, match=r"attn_logit_softcapping is 30\.0: a soft cap .* not supported"):
        read(config)


def test_bloom_has_aliases_of_keys(tmp_path: Path) -> None:
    config = {"model_type": "bloom", "vocab_size": 608, "n_embed": 96, "num_attention_heads": 6, "n_layer": 3}
    for more in ({}, {"hidden_size": 64, "n_head": 8}):
        found, reference = read({**more, **config}), theirs(tmp_path, {**more, **config})
        assert (found.hidden_size, found.num_heads, found.num_layers) == (96, 6, 3)
        assert (reference.hidden_size, reference.n_head, reference.n_layer) == (96, 6, 3)


@pytest.mark.parametrize(("changes", "kv_heads"), [({}, 1), ({"multi_query": True}, 1), ({"multi_query": False}, 4)])
def test_gpt_bigcode_has_one_key_value_head_unless_multi_query_is_off(
    tmp_path: Path, changes: dict[str, Any], kv_heads: int
) -> None:
    """Files on the hub have no `num_key_value_heads`; transformers 5 adds it."""
    config = {"model_type": "gpt_bigcode", "vocab_size": 608, "n_embd": 64, "n_head": 4, "n_layer": 3, **changes}
    found, reference = read(config), theirs(tmp_path, {**config, "bos_token_id": None, "eos_token_id": None})
    assert found.num_kv_heads == reference.num_key_value_heads == kv_heads
    assert (found.max_position, found.position_embeddings) == (reference.n_positions, reference.n_positions)
    assert (found.activation, reference.activation_function) == ("gelu_tanh", "gelu_pytorch_tanh")
    assert (found.tie_embeddings, found.rms_norm_eps) == (reference.tie_word_embeddings, reference.layer_norm_epsilon)
    for key, value in (("scale_attn_weights", False), ("add_cross_attention", True)):
        with pytest.raises(ModelError, match=rf"{key} is {value}: .* not supported"):
            read({**config, key: value})


@pytest.mark.parametrize("name", ["MptForCausalLM", "MPTForCausalLM"])
def test_mpt_has_two_names_of_its_class(name: str) -> None:
    config = {"model_type": "mpt", "vocab_size": 608, "d_model": 96, "n_heads": 6, "n_layers": 3}
    assert read({**config, "architectures": [name]}).architecture == "mpt"
    assert read({**config, "architectures": ["MptForSequenceClassification"]}).architecture == "mpt"
    with pytest.raises(ModelError, match=r"only MptForCausalLM is supported, and for labels MptForSeq"):
        read({**config, "architectures": ["MptForQuestionAnswering"]})


GEMMA4 = {**SIZES, "model_type": "gemma4_text", "num_hidden_layers": 12, "vocab_size_per_layer_input": 608}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"global_head_dim": 32, "head_dim": 16, "sliding_window": 21},
        {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
        {"num_global_key_value_heads": 1},
        {"num_kv_shared_layers": 5, "use_double_wide_mlp": True},
        {"layer_types": [LOCAL, FULL] * 5 + [LOCAL] * 2, "num_kv_shared_layers": 2},
        {"hidden_size_per_layer_input": 0},
        {"final_logit_softcapping": 30.0, "use_bidirectional_attention": "vision"},
    ],
    ids=str,
)
def test_layers_of_gemma_4_have_the_sizes_of_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    """As its first files say it, and as transformers writes it."""
    config = {**GEMMA4, **changes}
    reference = theirs(tmp_path, config)
    saved = json.loads(json.dumps(reference.to_dict()))
    for found in (read(config), read({**saved, "architectures": None, "num_hidden_layers": 12})):
        assert kinds_of(found) == reference.layer_types
        sources = [i for i, mode in enumerate(reference.kv_sharing_modes) if mode != "reuse"]
        for i in range(12):
            their = reference.per_layer_config[i]
            assert found.heads_of(i) == (4, their.num_key_value_heads, their.head_dim)
            assert (found.kv_source(i) == i) == (i in sources)
            assert kinds_of(found)[found.kv_source(i)] == kinds_of(found)[i]
            is_wide = reference.use_double_wide_mlp and i not in sources
            assert found.inner_of(i) == 96 * (2 if is_wide else 1)
            is_same = reference.attention_k_eq_v and kinds_of(found)[i] == FULL
            assert found.values_are_keys(i) == is_same
            rope = found.rope_of(i)
            assert rope is not None and rope.theta == (1e6 if kinds_of(found)[i] == FULL else 1e4)
        inputs = found.per_layer_inputs
        assert (0 if inputs is None else inputs.size) == reference.hidden_size_per_layer_input
        assert found.logit_softcap == reference.final_logit_softcapping
        assert found.sliding_window == reference.sliding_window


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all': bidirectional attention"),
        ({"enable_moe_block": True}, "enable_moe_block is True, but num_experts is None; it must be an integer of at"),
        ({"num_kv_shared_layers": 12}, "num_kv_shared_layers is 12; each of these layers must have one of its kind"),
        (
            {"num_kv_shared_layers": 8},
            r"num_kv_shared_layers is 8; .* of its kind \(layer_types\) before all of them: it may be at most 6",
        ),
        ({"global_head_dim": 33}, "global_head_dim is 33; it must be even"),
        ({"global_head_dim": 2**31}, "global_head_dim is 2147483648; it must be even, up to 2147483647"),
        (
            {"attention_k_eq_v": True, "num_global_key_value_heads": 3},
            "num_global_key_value_heads is 3; it must be a d",
        ),
        ({"vocab_size_per_layer_input": 600}, "vocab_size_per_layer_input is 600; it must be at least vocab_size"),
        (
            {"per_layer_config": {"1": {"head_dim": 8}}},
            r"per_layer_config is .*; it must be the same for all layers .* are \[5, 11\] by layer_types",
        ),
        (
            {"per_layer_config": {str(i): {"num_key_value_heads": 3} for i in (5, 11)}},
            "num_key_value_heads in per_layer_config is 3; it must be a divisor of num_attention_heads",
        ),
        (
            {"per_layer_config": {str(i): {"head_dim": 7} for i in (5, 11)}},
            "head_dim in per_layer_config is 7; it must be even",
        ),
        ({"per_layer_config": {str(i): {"size": 8} for i in (5, 11)}}, "per_layer_config has 'size' for layer 5; supp"),
        (
            {"rope_parameters": {FULL: {"rope_type": "proportional", "partial_rotary_factor": 2}, LOCAL: {}}},
            "partial_rotary_factor 2.0; it must be a number above 0",
        ),
    ],
)
def test_what_gemma_4_may_not_have_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        read({**GEMMA4, **changes})
