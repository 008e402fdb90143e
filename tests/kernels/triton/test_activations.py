"""Activations keep NaN, so that the row which has it fails. In the interpreter, each maximum does; `test_compiled.py`
looks at those of a GPU."""

import pytest
import torch
import triton
import triton.language as tl

from pipeline.kernels.activations import ACTIVATIONS
from pipeline.kernels.triton.activations import activate, gated_activation


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_nan_is_not_lost(kind: str, gated: bool) -> None:
    gate = torch.tensor([torch.nan, 1.0, -200.0, 1.0])
    up = torch.tensor([1.0, torch.nan, torch.nan, 2.0])
    x = torch.cat([gate, up])[None, None] if gated else gate[None, None]
    out = torch.empty(1, 4)
    activate(out, x, kind, gated=gated)
    assert out[0].isnan().tolist() == [True, gated, gated, False]


@triton.jit
def _clamped(out, gate, up, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, gated_activation(tl.load(gate + at), tl.load(up + at), "swiglu_oai", 1.702, 7.0))


def test_nan_is_not_lost_in_a_clamped_swiglu() -> None:
    gate = torch.tensor([torch.nan, 1.0, 9.0, 1.0])
    up = torch.tensor([1.0, torch.nan, -9.0, 2.0])
    out = torch.empty(4)
    _clamped[(1,)](out, gate, up, N=4)
    assert out.isnan().tolist() == [True, True, False, False]
