"""Files of models with gated DeltaNet layers: Qwen3.5 and later, and Qwen3-Next.

The value heads of qwen35 are in tiled order (`_LinearAttentionVReorderBase` in llama.cpp's converter), which stays: the
columns of `ssm_out` could not be moved where a block has several heads. Norms have 1 added, besides `ssm_norm`, and
`ssm_a` is -exp(A_log).
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pipeline.runtime.model.model_config import ModelConfig, Piece
from pipeline.runtime.model.special_layers import DeltaNet
from pipeline.stages.prepare.families.recurrent.delta_net import conv_pieces, gate_pieces, input_pieces
from pipeline.stages.prepare.files import shown
from pipeline.stages.prepare.gguf.architecture import GgufArchitecture, GgufKeys, experts_of
from pipeline.stages.prepare.gguf.metadata import Metadata
from pipeline.stages.prepare.sources.source import ModelError

RATES = "ssm_a"
LAYER_NAMES = {
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
RECURRENT_QKV = "linear_attn.in_proj_qkv"
"""`attn_qkv` of recurrent layers."""
WHOLE_NAMES = {"linear_attn.A_log": RATES, "linear_attn.dt_bias": "ssm_dt.bias"}
"""Names of tensors without `.weight`."""


def _read(*, tiled: bool, has_experts: bool) -> Callable[[GgufKeys, ModelConfig], dict[str, Any]]:
    def read(keys: GgufKeys, model: ModelConfig) -> dict[str, Any]:
        metadata, before = keys.metadata, f"{keys.architecture}."
        metadata.refuse_unless(f"{before}ssm.conv_kernel", 4, "a convolution of another size than 4")
        names = "group_count", "time_step_rank", "state_size", "inner_size"
        key_heads, value_heads, key_dim, values = (_count(metadata, f"{before}ssm.{key}") for key in names)
        if value_heads % key_heads or values % value_heads or values // value_heads % 32 or key_dim % 16:
            raise ModelError(
                f"{metadata.path}: {before}ssm.* is {key_heads} heads of {key_dim} for {value_heads} of all {values} "
                "values: heads of other sizes are not supported"
            )
        # Equal positions for all three parts of an image's tokens are those of text.
        metadata.list_of(f"{before}rope.dimension_sections", int)
        delta = DeltaNet(
            layers=_layers(keys),
            key_heads=key_heads,
            value_heads=value_heads,
            key_dim=key_dim,
            value_dim=values // value_heads,
            tiled=tiled,
            eps=model.rms_norm_eps,
        )
        found: dict[str, Any] = {"delta": delta}
        if has_experts:
            found["experts"] = experts_of(keys, model, normalized=True)
        return found

    return read


def _count(metadata: Metadata, key: str) -> int:
    value = metadata.need(key, int)
    if not 1 <= value < 2**20:
        raise ModelError(f"{metadata.path}: {key} is {shown(value)}; it must be a positive integer")
    return int(value)


def _layers(keys: GgufKeys) -> list[int]:
    """The recurrent ones: the file has a value for each layer, or every n-th layer is another one."""
    metadata, name = keys.metadata, f"{keys.architecture}.attention.recurrent_layers"
    every = metadata.get(f"{keys.architecture}.full_attention_interval", int, 4)
    listed = metadata.list_of(name, int)
    num = keys.num_layers
    if listed is not None and len(listed) < num:
        raise ModelError(f"{metadata.path}: {name} has {len(listed)} values; the model has {num} layers")
    if every < 1:
        raise ModelError(f"{metadata.path}: full_attention_interval is {shown(every)}; it must be a positive integer")
    is_recurrent = [bool((i + 1) % every) for i in range(num)] if listed is None else [bool(one) for one in listed]
    layers = [i for i in range(num) if is_recurrent[i]]
    if not 0 < len(layers) < num:
        what = f"{len(layers)} of {num} layers are recurrent; layers of both kinds must be there"
        raise ModelError(f"{metadata.path}: {what}")
    return layers


def pieces_of(model: ModelConfig) -> dict[str, Piece]:
    """Where rows of matrices are in the file's tensors."""
    delta = model.delta
    assert delta is not None
    pieces = gate_pieces(model) | conv_pieces(model) | input_pieces(model)
    if delta.tiled:
        return pieces
    # Qwen3-Next: for each key head b of its value heads, then their a.
    ratio = delta.value_heads // delta.key_heads
    for i, name in enumerate("ba"):
        begin = i * ratio
        piece = Piece("linear_attn.in_proj_ba", delta.key_heads, begin, begin + ratio)
        pieces[f"linear_attn.{name}_proj"] = piece
    return pieces


def logarithms(rates: Iterator["np.ndarray[Any, Any]"], name: str) -> Iterator["np.ndarray[Any, Any]"]:
    """A_log of -exp(A_log). Raises ModelError if a number is above 0 or NaN."""
    for part in rates:
        if not (part <= 0).all():
            raise ModelError(f"tensor {name} has numbers above 0, or that are no numbers")
        with np.errstate(divide="ignore"):
            yield np.log(-part.astype(np.float64)).astype(np.float32)


QWEN = {"qk_norm": True, "attention_gate": True}
POST = {"post_attention_layernorm": "post_attention_norm"}
ARCHITECTURES: dict[str, GgufArchitecture] = {
    "qwen35": GgufArchitecture(
        models="Qwen3.5, 3.6, 3.8",
        model_type="qwen3_5_text",
        always=QWEN,
        read=_read(tiled=True, has_experts=False),
        has_drafts=True,
        names=POST,
    ),
    "qwen35moe": GgufArchitecture(
        models="Qwen3.5 and 3.6 MoE",
        model_type="qwen3_5_moe_text",
        always=QWEN,
        read=_read(tiled=True, has_experts=True),
        reads_experts=True,
        has_drafts=True,
        names=POST,
    ),
    "qwen3next": GgufArchitecture(
        models="Qwen3-Next, Coder-Next",
        model_type="qwen3_next",
        always=QWEN,
        read=_read(tiled=False, has_experts=True),
        reads_experts=True,
        has_drafts=True,
        names=POST,
    ),
}
