"""The short convolution of LFM2, in float32: a causal one of a few tokens, for each channel by itself.

    b, c, x ─► out = c * conv(b * x)

Its state is the last products b * x. Tokens are summed in one order, so a token has the same bits in any chunk.
"""

import torch
from torch import Tensor

from pipeline.kernels.step_inputs import StepInputs


def short_conv(out: Tensor, x: Tensor, slots: Tensor, inputs: StepInputs, weights: Tensor, layer: int) -> None:
    """out [T, channels] of any dtype; x [T, 3 * channels] float32: b, c and x; weights [taps, channels] float32, the
    last one is that of the token itself. Each entry of the step reads one of the `slots` (or none: zeros) and writes
    one, see `StepInputs.state_reads`; the state [taps - 1, channels] begins at float `layer` of a slot."""
    taps, channels = weights.shape
    size = (taps - 1) * channels
    for entry in range(inputs.num_rows):
        first, count = int(inputs.offsets[entry]), int(inputs.counts[entry])
        read, write = int(inputs.state_reads[entry]), int(inputs.state_writes[entry])
        before = slots.new_zeros(size) if read < 0 else slots[read, layer : layer + size]
        b, c, values = torch.split(x[first : first + count], channels, 1)
        history = torch.cat([before.view(taps - 1, channels), b * values])
        mixed = torch.zeros_like(b)
        for i in range(taps):
            mixed += history[i : i + count] * weights[i]
        out[first : first + count] = c * mixed
        slots[write, layer : layer + size] = history[count:].reshape(-1)


def short_conv_reference(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The formula in float64, of a row without a state before: the result [N, channels], and the last products
    [taps - 1, channels]."""
    b, c, values = x.double().chunk(3, 1)
    taps = len(weights)
    history = torch.cat([b.new_zeros(taps - 1, b.shape[1]), b * values])
    return c * torch.einsum("nct,tc->nc", history.unfold(0, taps, 1), weights.double()), history[len(x) :]
