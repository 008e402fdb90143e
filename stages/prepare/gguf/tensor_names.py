"""The names of tensors in .gguf files, and in models."""

import re
from collections.abc import Iterable, Mapping

from pipeline.runtime.model.model_config import ModelConfig, Piece
from pipeline.stages.prepare.gguf import gemma4
from pipeline.stages.prepare.gguf.architecture import GgufArchitecture
from pipeline.stages.prepare.gguf.recurrent import delta_net, short_conv

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "position_embd": "model.embed_positions",
    "token_embd_norm": "model.embed_norm",
    "token_types": "model.embed_token_types",
    **gemma4.NAMES,
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q": "self_attn.q_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_attention_norm": "self_attn_post_norm",
    "post_ffw_norm": "mlp_post_norm",
    "attn_output_norm": "self_attn_residual_norm",
    "layer_output_norm": "mlp_residual_norm",
    "xielu": "mlp.xielu",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **delta_net.LAYER_NAMES,
    **short_conv.LAYER_NAMES,
    **gemma4.LAYER_NAMES,
}
WHOLE_NAMES = {
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.selection.bias": "exp_probs_b.bias",
    **delta_net.WHOLE_NAMES,
    **gemma4.WHOLE_NAMES,
}
STACKED = "mlp.gate_up_proj"
"""Gate and up, where `ffn_up` holds both."""
STACKED_EXPERTS = {name: Piece(f"mlp.experts.{name}") for name in ("gate_proj", "up_proj", "down_proj")}
"""Files have the matrices of all experts in one tensor, but those of Mixtral from before April 2024."""
STACKED_GATE_UP = "ffn_gate_up_exps.weight"
"""In some files, a tensor has gate and up of all experts."""
EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj")
FIRST_EXPERT = re.compile(r"blk\.\d+\.ffn_gate\.0\.weight")
"""Of a file with a tensor for each expert."""


def stacked_experts(tensors: Iterable[str], inner: int) -> dict[str, Piece]:
    """The matrices of a file's experts, whose intermediate size is `inner`."""
    if not any(name.endswith(f".{STACKED_GATE_UP}") for name in tensors):
        return STACKED_EXPERTS
    tensor = "mlp.experts.gate_up_proj"
    gate_up = {"gate_proj": Piece(tensor, end=inner), "up_proj": Piece(tensor, begin=inner, end=2 * inner)}
    return STACKED_EXPERTS | gate_up


def gguf_name(name: str, names: Mapping[str, str] = {}) -> str:
    """`model.layers.3.self_attn.q_proj.weight` → `blk.3.attn_q.weight`. `names` are those that differ from the usual
    ones."""
    if (match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)) and match[2] in WHOLE_NAMES:
        return f"blk.{match[1]}.{WHOLE_NAMES[match[2]]}"
    stem, _, kind = name.rpartition(".")
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem):
        layer, part = match.groups()
        if expert := EXPERT.fullmatch(part):
            return f"blk.{layer}.ffn_{expert[2]}.{expert[1]}.{kind}"
        return f"blk.{layer}.{names.get(part) or _GGUF_LAYER_NAMES[part]}.{kind}"
    return f"{names.get(stem) or _GGUF_NAMES[stem]}.{kind}"


_GGUF_NAMES = {hf_name: name for name, hf_name in NAMES.items()}
_GGUF_LAYER_NAMES = {hf_name: name for name, hf_name in LAYER_NAMES.items()} | {
    STACKED: "ffn_up",
    delta_net.RECURRENT_QKV: "attn_qkv",
}


def differing_names(architecture: GgufArchitecture, config: ModelConfig) -> dict[str, str]:
    """The names of tensors that differ from the usual ones; of a layer's, without its prefix."""
    names = dict(architecture.names)
    if config.architecture == "falcon" and not config.shared_norm:
        names |= {"input_layernorm": "attn_norm_2", "post_attention_layernorm": "attn_norm"}
    return names
