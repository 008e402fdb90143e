"""Activations and layer norms are those of their formulas in float64."""

import pytest
import torch

from pipeline.kernels.activations import (
    ACTIVATIONS,
    activate,
    activate_mul,
    activation_reference,
    gate,
    xielu,
    xielu_reference,
)
from pipeline.kernels.rms_norm import layer_norm, layer_norm_reference


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations(kind: str) -> None:
    x = torch.cat([torch.linspace(-30, 30, 601), torch.tensor([-1e4, 1e4, 0.0])])[None].repeat(3, 1)
    out = torch.empty_like(x)
    activate(out, x, kind)
    torch.testing.assert_close(out.double(), activation_reference(x, kind), rtol=1e-5, atol=1e-6)
    up = torch.rand_like(x) * 2 - 1  # at most 1, so that the error is no larger than that of the activation
    activate_mul(out, torch.cat([x, up], dim=1), kind)
    torch.testing.assert_close(out.double(), activation_reference(x, kind) * up.double(), rtol=1e-5, atol=1e-6)


def test_xielu() -> None:
    x = torch.cat([torch.linspace(-30, 30, 601), torch.tensor([-1e4, 1e4, -1e-7, 0.0])])[None].repeat(3, 1)
    out, form = torch.empty_like(x), (0.8, 0.7, 0.5, -1e-6)
    xielu(out, x, *form)
    torch.testing.assert_close(out.double(), xielu_reference(x, *form), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("num", "function"), [(8, "sigmoid"), (2, "sigmoid"), (8, "softplus"), (2, "softplus")])
def test_gates_of_columns_and_of_groups_of_them(num: int, function: str) -> None:
    x, gates = torch.randn(5, 8), torch.randn(5, num) * 4
    wide = gates.double().repeat_interleave(8 // num, dim=1)
    expected = x.double() * (1 / (1 + torch.exp(-wide)) if function == "sigmoid" else torch.log1p(torch.exp(wide)))
    gate(x, gates, function)
    torch.testing.assert_close(x.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm(bias: bool) -> None:
    x, weight = torch.randn(5, 96) + 3, torch.randn(96)
    shift = torch.randn(96) if bias else None
    out = torch.empty_like(x)
    layer_norm(out, x, weight, shift, 1e-5)
    expected = layer_norm_reference(x, weight, shift, 1e-5)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
