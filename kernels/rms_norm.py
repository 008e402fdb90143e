"""Root-mean-square normalisation (Zhang and Sennrich, 2019, arXiv:1910.07467) and layer normalisation (Ba et al., 2016,
arXiv:1607.06450), computed in float32."""

import torch
from torch import Tensor

from pipeline.kernels.row_by_row import row_by_row


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """`out = x / sqrt(mean(x^2) + eps) * weight`, each row by itself. out and x [N, H], weight [H],
    each of any dtype."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    out.copy_((wide * scale).mul_(weight))


def layer_norm(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> None:
    """`out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias`, each row by itself. out and x [N, H], weight and
    bias [H], each of any dtype."""
    wide = x.float()
    wide = wide - wide.mean(-1, keepdim=True)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    wide.mul_(scale).mul_(weight)
    if bias is not None:
        wide += bias
    out.copy_(wide)


def copy(out: Tensor, x: Tensor) -> None:
    """`out = x`, each of any dtype."""
    out.copy_(x)


def add(out: Tensor, x: Tensor, factor: float = 1.0) -> None:
    """`out += x * factor`. Both [N, H], each of any dtype."""
    if factor == 1.0:
        out.add_(x)
    else:
        out.add_(x.to(out.dtype) * factor)  # not `alpha`, which rounds once or twice


def scale(out: Tensor, factor: float) -> None:
    """`out *= factor`"""
    out.mul_(factor)


def softcap(out: Tensor, cap: float) -> None:
    """`out = cap * tanh(out / cap)`, each row by itself"""
    out.copy_(row_by_row(torch.tanh, out.div_(cap))).mul_(cap)


def add_vector(out: Tensor, x: Tensor) -> None:
    """`out += x`. out [N, H], x [H]."""
    out.add_(x)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The formula in float64."""
    wide = x.double()
    return (wide / torch.sqrt((wide**2).mean(-1, keepdim=True) + eps)) * weight.double()


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """The formula in float64."""
    wide = x.double()
    centered = wide - wide.mean(-1, keepdim=True)
    normed = centered / torch.sqrt((centered**2).mean(-1, keepdim=True) + eps) * weight.double()
    return normed if bias is None else normed + bias.double()
