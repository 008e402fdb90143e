"""The last matmul of a model: `out = x @ weight.T`, float32 for any dtype of the weight.

The versions are those of linear.py. torch rounds a bfloat16 matmul to bfloat16, in which the largest logits are often
equal. `logits` computes those again in float32, which costs little and orders the top candidates correctly.
"""

import torch
from torch import Tensor

from pipeline.kernels.linear import FEW_ROWS, TILE_ELEMENTS

NUM_REFINED = 32
"""Number of a row's largest logits that are computed again."""


def logits(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """out [N, V] float32, x [N, H], weight [V, H]."""
    if x.dtype == torch.float32:
        torch.mm(x, weight.t(), out=out)
        return
    out.copy_(torch.mm(x, weight.t()))
    largest = out.topk(min(NUM_REFINED, out.shape[1]), dim=-1, sorted=False).indices
    candidates = weight[largest].float()
    out.scatter_(1, largest, torch.bmm(candidates, x.float()[:, :, None])[:, :, 0])


def logits_upcast(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """The same for bfloat16 weights, multiplied as float32."""
    if len(x) <= FEW_ROWS:
        logits(out, x, weight)
        return
    wide = x.float()
    width = max(1, TILE_ELEMENTS // weight.shape[1])
    for begin in range(0, len(weight), width):
        out[:, begin : begin + width] = torch.mm(wide, weight[begin : begin + width].float().t())
