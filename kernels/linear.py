"""A linear layer: `out = x @ weight.T + bias`, with sums in float32 at least.

There are two versions for the CPU. `linear` uses torch's matmul. `linear_upcast` is for bfloat16 on CPUs without
bfloat16 instructions, where torch's matmul of several rows is about eight times slower than float32: it converts the
weight to float32 tile by tile, so that the tile is still in the cache when it is multiplied.
"""

import torch
from torch import Tensor

TILE_ELEMENTS = 1 << 21
"""Elements of a weight to convert at once: 8 MiB as float32."""

FEW_ROWS = 2
"""Up to this number of rows, converting costs more than it saves."""


def linear(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """out [N, M], x [N, K], weight [M, K], bias [M] or None."""
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def linear_upcast(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """The same for bfloat16 weights, multiplied as float32 and rounded once at the end."""
    if len(x) <= FEW_ROWS:
        linear(out, x, weight, bias)
        return
    wide = x.float()
    width = max(1, TILE_ELEMENTS // weight.shape[1])
    for begin in range(0, len(weight), width):
        tile = torch.mm(wide, weight[begin : begin + width].float().t())
        if bias is not None:
            tile += bias[begin : begin + width]
        out[:, begin : begin + width] = tile


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The formula in float64."""
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()
