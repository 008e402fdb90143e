"""The activation of a feed-forward layer, alone or as the gate of a GLU (Shazeer, 2020, arXiv:2002.05202)."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.kernels.row_by_row import row_by_row


def gelu_tanh(x: Tensor) -> Tensor:
    """The approximation of GELU by tanh (Hendrycks and Gimpel, 2016, arXiv:1606.08415)."""
    return functional.gelu(x, approximate="tanh")


def gelu_quick(x: Tensor) -> Tensor:
    """The approximation of GELU by a sigmoid, in the same paper."""
    return x * torch.sigmoid(1.702 * x)


def relu2(x: Tensor) -> Tensor:
    """The square of ReLU (So et al., 2021, arXiv:2109.08668)."""
    return functional.relu(x).square()


def swiglu_oai(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """The clamped SwiGLU of gpt-oss (`GptOssExperts` in transformers), gate and up [N, I]."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * row_by_row(torch.sigmoid, gate * alpha) * (up + 1)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": gelu_tanh,
    "gelu_quick": gelu_quick,
    "relu": functional.relu,
    "relu2": relu2,
}
"""By `Activation` of `ModelConfig`."""


def activate(out: Tensor, x: Tensor, kind: str) -> None:
    """`out = kind(x)`, both [N, I]."""
    out.copy_(row_by_row(ACTIVATIONS[kind], x))


def activate_mul(out: Tensor, gate_up: Tensor, kind: str) -> None:
    """`out = kind(gate) * up`. gate_up [N, 2I] holds the gate's half first; out [N, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    torch.mul(row_by_row(ACTIVATIONS[kind], gate), up, out=out)


def gate(x: Tensor, gates: Tensor, function: str = "sigmoid") -> None:
    """`x *= function(gates)`, x [N, I] and gates [N, G], each for I / G adjacent columns."""
    factors = row_by_row(torch.sigmoid if function == "sigmoid" else functional.softplus, gates)
    x.view(len(x), gates.shape[-1], -1).mul_(factors[..., None])


def xielu(out: Tensor, x: Tensor, positive: float, negative: float, linear: float, largest: float) -> None:
    """xIELU of all of x (Huang and Schlag, 2024, arXiv:2411.13010), both [N, I]."""
    low = negative * (torch.expm1(x.clamp(max=largest)) - x)
    out.copy_(linear * x + torch.where(x > 0, positive * x * x, low))


def xielu_reference(x: Tensor, positive: float, negative: float, linear: float, largest: float) -> Tensor:
    """The formula in float64."""
    x = x.double()
    low = negative * (torch.expm1(torch.minimum(x, torch.tensor(largest))) - x)
    return linear * x + torch.where(x > 0, positive * x**2, low)


def activation_reference(x: Tensor, kind: str) -> Tensor:
    """The formula in float64."""
    x = x.double()
    match kind:
        case "silu":
            return x / (1 + torch.exp(-x))
        case "gelu":
            return x * 0.5 * torch.erfc(-x / math.sqrt(2))
        case "gelu_tanh":
            return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        case "gelu_quick":
            return x / (1 + torch.exp(-1.702 * x))
        case "relu":
            return torch.where(x > 0, x, 0.0)
        case _:
            return torch.where(x > 0, x * x, 0.0)
