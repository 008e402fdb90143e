"""The activation of a SwiGLU feed-forward layer (Shazeer, 2020, arXiv:2002.05202)."""

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.kernels.row_by_row import row_by_row


def silu_mul(out: Tensor, gate_up: Tensor) -> None:
    """`out = silu(gate) * up`. gate_up [N, 2I] holds the gate's half first; out [N, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    torch.mul(row_by_row(functional.silu, gate), up, out=out)


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """The formula in float64."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up
