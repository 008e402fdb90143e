"""The last matmul of a model: `out = x @ weight.T`, float32 for any dtype of the weight.

The versions are those of linear.py. torch rounds a bfloat16 matmul to bfloat16, in which the largest logits are often
equal. `logits` computes those again in float32, row by row, which costs little and orders the top candidates correctly.
"""

import torch
from torch import Tensor

from pipeline.kernels.linear import linear, linear_upcast

NUM_REFINED = 32
"""Number of a row's largest logits that are computed again."""


def logits(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """out [N, V] float32, x [N, H], weight [V, H]."""
    linear(out, x, weight, None)
    if x.dtype == torch.float32:
        return
    num = min(NUM_REFINED, out.shape[1])
    for row, hidden in zip(out, x.float(), strict=True):
        largest = row.topk(num, sorted=False).indices
        row[largest] = torch.mv(weight[largest].float(), hidden.clone())


def logits_upcast(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """The same for bfloat16 weights, multiplied as float32."""
    linear_upcast(out, x, weight, None)
