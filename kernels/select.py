"""Selects the functions of a device once, when the executor starts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.kernels import activations, experts, linear, logits, rms_norm, silu_mul, take_rows
from pipeline.kernels.attention import kv_layout, paged_attention, rotary
from pipeline.kernels.attention.kv_layout import LayerKV
from pipeline.kernels.attention.paged_attention import AttentionPlan, ScoreOptions
from pipeline.kernels.experts import RouteOptions
from pipeline.kernels.recurrent import delta, short_conv
from pipeline.kernels.recurrent.delta import DeltaOptions, DeltaVectors
from pipeline.kernels.sampling import sample
from pipeline.kernels.step_inputs import StepInputs


@dataclass(frozen=True, slots=True)
class Ops:
    """The functions of one backend for one dtype. Each writes into given memory, so that calls can be recorded. Their
    own files document the arguments."""

    name: str
    device: str
    dtype: torch.dtype
    take_rows: Callable[[Tensor, Tensor, Tensor], None]
    rms_norm: Callable[[Tensor, Tensor, Tensor, float], None]
    layer_norm: Callable[[Tensor, Tensor, Tensor, Tensor | None, float], None]
    copy: Callable[[Tensor, Tensor], None]
    add: Callable[[Tensor, Tensor, float], None]
    add_vector: Callable[[Tensor, Tensor], None]
    scale: Callable[[Tensor, float], None]
    softcap: Callable[[Tensor, float], None]
    head_norm: Callable[[Tensor, Tensor, Tensor, LayerKV, float], None]
    qk_norm: Callable[[Tensor, Tensor, Tensor, LayerKV, float, str, str], None]
    value_norm: Callable[[Tensor, LayerKV, float], None]
    turn_queries: Callable[[Tensor, Tensor, Tensor, LayerKV, Tensor | None, float], None]
    scale_queries: Callable[[Tensor, Tensor, LayerKV, float, int], None]
    linear: Callable[[Tensor, Tensor, Tensor, Tensor | None], None]
    logits: Callable[[Tensor, Tensor, Tensor], None]
    rotary_angles: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], None]
    rotary_write: Callable[[Tensor, Tensor, Tensor, Tensor, LayerKV], None]
    attention_plan: Callable[[int | None, ScoreOptions, int, int | None], AttentionPlan]
    attention: Callable[[Tensor, Tensor, LayerKV, AttentionPlan, Tensor | None, Tensor | None], None]
    silu_mul: Callable[[Tensor, Tensor], None]
    activate: Callable[[Tensor, Tensor, str], None]
    activate_mul: Callable[[Tensor, Tensor, str], None]
    route: Callable[[Tensor, Tensor, Tensor, Tensor | None, RouteOptions], None]
    experts: Callable[..., None]
    add_gated: Callable[[Tensor, Tensor, Tensor | None], None]
    gate: Callable[[Tensor, Tensor], None]
    delta_rule: Callable[[Tensor, Tensor, Tensor, StepInputs, DeltaVectors, DeltaOptions], None]
    short_conv: Callable[[Tensor, Tensor, Tensor, StepInputs, Tensor, int], None]
    argmax: Callable[[Tensor], Tensor]
    sample: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    kv_allocate: Callable[[int, int, int, int, torch.dtype, str], Tensor]
    kv_swap: Callable[[Tensor, Tensor], Tensor]
    copy_blocks: Callable[[Tensor, Tensor | None, Sequence[int], Sequence[int]], None]


def select(device: str, dtype: torch.dtype) -> Ops:
    """The best functions for a device and a dtype on this machine. Raises ValueError for a device without kernels."""
    if device != "cpu":
        raise ValueError(f"no kernels for device {device!r}")
    upcast = dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return Ops(
        name="torch, widened" if upcast else "torch",
        device=device,
        dtype=dtype,
        take_rows=take_rows.take_rows,
        rms_norm=rms_norm.rms_norm,
        layer_norm=rms_norm.layer_norm,
        copy=rms_norm.copy,
        add=rms_norm.add,
        add_vector=rms_norm.add_vector,
        scale=rms_norm.scale,
        softcap=rms_norm.softcap,
        head_norm=rotary.head_norm,
        qk_norm=rotary.qk_norm,
        value_norm=rotary.value_norm,
        turn_queries=rotary.turn_queries,
        scale_queries=rotary.scale_queries,
        linear=linear.linear_upcast if upcast else linear.linear,
        logits=logits.logits_upcast if upcast else logits.logits,
        rotary_angles=rotary.rotary_angles,
        rotary_write=rotary.rotary_write,
        attention_plan=AttentionPlan,
        attention=paged_attention.paged_attention,
        silu_mul=silu_mul.silu_mul,
        activate=activations.activate,
        activate_mul=activations.activate_mul,
        route=experts.route,
        experts=experts.experts,
        add_gated=experts.add_gated,
        gate=activations.gate,
        delta_rule=delta.delta_rule,
        short_conv=short_conv.short_conv,
        argmax=sample.argmax,
        sample=sample.sample,
        kv_allocate=kv_layout.allocate,
        kv_swap=kv_layout.swap_blocks,
        copy_blocks=kv_layout.copy_blocks,
    )
