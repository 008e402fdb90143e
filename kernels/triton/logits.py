"""What some models do to logits: a bias, a factor, a cap.

Shapes: S samples, V vocabulary size.
"""

import triton
import triton.language as tl
from torch import Tensor

from pipeline.kernels.triton.activations import tanh

BLOCK = 1024


def finish_logits(logits: Tensor, bias: Tensor | None, scale: float = 1.0, softcap: float | None = None) -> None:
    """`logits = (logits + bias) * scale`, then `softcap * tanh(logits / softcap)`, in place. logits [S, V] float32,
    bias [V] float32."""
    num_samples, width = logits.shape
    _finish[(num_samples, triton.cdiv(width, BLOCK))](
        logits,
        logits if bias is None else bias,
        WIDTH=width,
        BIASED=bias is not None,
        SCALE=scale,
        SOFTCAP=softcap or 0.0,
        BLOCK=BLOCK,
        num_warps=4,
    )


@triton.jit
def _finish(
    logits,
    bias,
    WIDTH: tl.constexpr,
    BIASED: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    at = logits + tl.program_id(0).to(tl.int64) * WIDTH + columns
    numbers = tl.load(at, mask=inside, other=0.0)
    if BIASED:
        numbers += tl.load(bias + columns, mask=inside, other=0.0)
    numbers *= SCALE
    if SOFTCAP > 0:
        numbers = SOFTCAP * tanh(numbers / SOFTCAP)
    tl.store(at, numbers, mask=inside)
