"""Models with gated DeltaNet layers: Qwen3-Next, the text models of Qwen3.5, 3.6 and 3.8, and OLMo hybrid."""

from typing import Any

from pipeline.runtime.model.architecture_names import Architecture
from pipeline.runtime.model.model_config import Layout, ModelConfig, Piece
from pipeline.runtime.model.special_layers import DeltaNet
from pipeline.stages.prepare.families.architecture import HfArchitecture, renamed
from pipeline.stages.prepare.families.experts import NUM_EXPERTS, experts_of, sparse_layers
from pipeline.stages.prepare.families.keys import ConfigFault, Keys
from pipeline.stages.prepare.families.olmo import OLMO2
from pipeline.stages.prepare.files import shown

CONV = "linear_conv_kernel_dim"


def _layers(keys: Keys, model: ModelConfig) -> list[int]:
    """The recurrent ones: those of `layer_types`, by default all but each `full_attention_interval`-th."""
    kinds = keys.layer_kinds(model.num_layers, ("full_attention", "linear_attention"))
    if kinds is None:
        every = keys.count("full_attention_interval", 4)
        kinds = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(model.num_layers)]
    layers = [i for i, kind in enumerate(kinds) if kind == "linear_attention"]
    if not 0 < len(layers) < model.num_layers:
        raise ConfigFault(f"layer_types is {shown(kinds)}; layers of both kinds must be there")
    return layers


def _delta(keys: Keys, model: ModelConfig, sizes: tuple[int, int, int, int], **others: Any) -> dict[str, Any]:
    """`sizes` are the numbers of key and value heads, and their dimensions."""
    keys.refuse_unless(CONV, 4, what="a convolution of another size than 4")
    if keys.get("hidden_act", str, "silu") not in ("silu", "swish"):
        raise keys.fault("hidden_act", "silu: the convolution of recurrent layers has it too")
    key_heads, value_heads, key_dim, value_dim = sizes
    if value_heads % key_heads:
        raise keys.fault("linear_num_value_heads", f"a multiple of linear_num_key_heads = {key_heads}")
    if value_dim % 32:
        raise keys.fault("linear_value_head_dim", "a multiple of 32")
    delta = DeltaNet(
        layers=_layers(keys, model),
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        **others,
    )
    return {"delta": delta}


def _qwen(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    key_heads, value_heads = keys.count("linear_num_key_heads", 16), keys.count("linear_num_value_heads", 32)
    dims = keys.count("linear_key_head_dim", 128), keys.count("linear_value_head_dim", 128)
    return _delta(keys, model, (key_heads, value_heads, *dims), eps=model.rms_norm_eps)


def _qwen_moe(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    found = experts_of(
        keys,
        "moe_intermediate_size",
        normalized=True,
        shared_intermediate_size=keys.count("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return _qwen(keys, model) | found


def _qwen3_next(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    found = experts_of(
        keys,
        "moe_intermediate_size",
        normalized=keys.flag("norm_topk_prob", True),
        shared_intermediate_size=keys.count("shared_expert_intermediate_size"),
        shared_gate=True,
        layers=sparse_layers(keys, model),
    )
    return _qwen(keys, model) | found


def _olmo_hybrid(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    key_heads, value_heads = (keys.count(f"linear_num_{kind}_heads", model.num_heads) for kind in ("key", "value"))
    key_dim = keys.count("linear_key_head_dim", int(0.75 * model.hidden_size / key_heads))
    sizes = key_heads, value_heads, key_dim, keys.count("linear_value_head_dim", 2 * key_dim)
    beta = 2.0 if keys.flag("linear_allow_neg_eigval", True) else 1.0
    found = _delta(keys, model, sizes, eps=1e-5, beta=beta)
    rope = keys.get("rope_parameters", dict) or {}
    if rope.get("rope_theta") is None and keys.get("rope_theta", (int, float)) is None:
        found["rotary_dim"] = 0
    return found


def gate_pieces(model: ModelConfig) -> dict[str, Piece]:
    """Each head of q_proj is followed by its gate."""
    dim, heads = model.head_dim, model.num_heads
    return {
        "self_attn.q_proj": Piece("self_attn.q_proj", heads, 0, dim),
        "self_attn.gate_proj": Piece("self_attn.q_proj", heads, dim, 2 * dim),
    }


def _sizes(model: ModelConfig) -> tuple[DeltaNet, int, int]:
    """The numbers of channels of keys and of values."""
    delta = model.delta
    assert delta is not None
    return delta, delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim


def conv_pieces(model: ModelConfig) -> dict[str, Piece]:
    """Queries, keys and values, one below the other."""
    _, keys, values = _sizes(model)
    ends = [0, keys, 2 * keys, 2 * keys + values]
    return {
        f"linear_attn.{name}_conv1d": Piece("linear_attn.conv1d", begin=ends[i], end=ends[i + 1])
        for i, name in enumerate("qkv")
    }


def input_pieces(model: ModelConfig) -> dict[str, Piece]:
    """Queries, keys and values, one below the other; z, b and a."""
    _, keys, values = _sizes(model)
    ends = [0, keys, 2 * keys, 2 * keys + values]
    inputs = {
        f"linear_attn.{name}_proj": Piece("linear_attn.in_proj_qkv", begin=ends[i], end=ends[i + 1])
        for i, name in enumerate("qkv")
    }
    return inputs | {f"linear_attn.{name}_proj": Piece(f"linear_attn.in_proj_{name}") for name in "zba"}


def _qwen_layout(model: ModelConfig) -> Layout:
    router = renamed(mlp__router="mlp.gate") if model.experts is not None else {}
    return Layout(pieces=gate_pieces(model) | conv_pieces(model) | input_pieces(model) | router)


def _qwen3_next_layout(model: ModelConfig) -> Layout:
    """For each key head: its query and key, then the values and z of its value heads; and their b, then their a."""
    delta, _, _ = _sizes(model)
    ratio = delta.value_heads // delta.key_heads
    widths = delta.key_dim, delta.key_dim, ratio * delta.value_dim, ratio * delta.value_dim
    inputs = {}
    for tensor, parts in (("qkvz", zip("qkvz", widths, strict=True)), ("ba", [("b", ratio), ("a", ratio)])):
        begin = 0
        for name, width in parts:
            piece = Piece(f"linear_attn.in_proj_{tensor}", delta.key_heads, begin, begin + width)
            inputs[f"linear_attn.{name}_proj"] = piece
            begin += width
    pieces = gate_pieces(model) | conv_pieces(model) | inputs
    return Layout(pieces=pieces | renamed(mlp__router="mlp.gate"), experts=EACH_EXPERT)


def _olmo_layout(model: ModelConfig) -> Layout:
    """Norms of layers with attention have OLMo 3's names."""
    norms = renamed(
        input_layernorm="attention_layer_norm",
        post_attention_layernorm="feedforward_layer_norm",
        self_attn_post_norm="post_attention_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
    )
    parts = {"z_proj": "g_proj", "out_proj": "o_proj", "norm": "o_norm"}
    return Layout(pieces=norms | {f"linear_attn.{ours}": Piece(f"linear_attn.{name}") for ours, name in parts.items()})


EACH_EXPERT = {name: Piece(f"mlp.experts.{{}}.{name}") for name in ("gate_proj", "up_proj", "down_proj")}
QWEN = {"mlp_bias": False, "qk_norm": True, "norm_offset": 1.0, "attention_gate": True}
QWEN_DEFAULTS = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
}
MOE_DEFAULTS = {
    **QWEN_DEFAULTS,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}

ARCHITECTURES: dict[Architecture, HfArchitecture] = {
    "qwen3_5_text": HfArchitecture(
        class_name="Qwen3_5ForCausalLM",
        models="Qwen3.5, 3.6, 3.8",
        defaults=QWEN_DEFAULTS,
        always=QWEN,
        fields=_qwen,
        layout=_qwen_layout,
    ),
    "qwen3_5_moe_text": HfArchitecture(
        class_name="Qwen3_5MoeForCausalLM",
        models="Qwen3.5 and 3.6 MoE",
        aliases=NUM_EXPERTS,
        defaults=MOE_DEFAULTS,
        always=QWEN,
        inner=lambda keys: keys.count("moe_intermediate_size"),
        fields=_qwen_moe,
        layout=_qwen_layout,
    ),
    "qwen3_next": HfArchitecture(
        class_name="Qwen3NextForCausalLM",
        models="Qwen3-Next, Coder-Next",
        aliases=NUM_EXPERTS,
        defaults={**MOE_DEFAULTS, "num_experts": 512, "num_experts_per_tok": 10},
        always=QWEN,
        fields=_qwen3_next,
        layout=_qwen3_next_layout,
    ),
    "olmo_hybrid": HfArchitecture(
        class_name="OlmoHybridForCausalLM",
        models="OLMo Hybrid",
        defaults={"max_position_embeddings": 65536},
        always=OLMO2,
        fields=_olmo_hybrid,
        layout=_olmo_layout,
    ),
}
