"""Root-mean-square normalisation (Zhang and Sennrich, 2019, arXiv:1910.07467), computed in float32."""

import torch
from torch import Tensor


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """`out = x / sqrt(mean(x^2) + eps) * weight`, each row by itself. out and x [N, H], weight [H],
    each of any dtype."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    out.copy_((wide * scale).mul_(weight))


def add(out: Tensor, x: Tensor) -> None:
    """`out += x`. Both [N, H], each of any dtype."""
    out.add_(x)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The formula in float64."""
    wide = x.double()
    return (wide / torch.sqrt((wide**2).mean(-1, keepdim=True) + eps)) * weight.double()
