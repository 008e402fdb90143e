"""Quantizes floats to int8 and int4 in groups with a scale, when a model is loaded.

Shapes: n groups of G values.
"""

import torch
from torch import Tensor

SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7)
"""Fractions of a group's range to try for int4's 16 codes: a smaller range clips extremes, but has finer steps."""


def to_int8(groups: Tensor) -> tuple[Tensor, Tensor]:
    """groups [n, G] float32 → scales [n] float16, codes [n, G] int8 from -127 to 127"""
    scale = _half(groups.abs().amax(dim=1) / 127)
    return scale, (groups * _inverse(scale)).round_().clamp_(-127, 127).to(torch.int8)


def to_int4(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """groups [n, G] float32 → scales and minimums [n] float16, codes [n, G] uint8 from 0 to 15.

    Tries several fractions of the range, fits scale and minimum to the codes by least squares, and takes the fraction
    with the smallest squared error.
    """
    low, high = groups.amin(dim=1), groups.amax(dim=1)
    mean = groups.mean(dim=1)
    best_error = torch.full_like(low, torch.inf)
    best_scale, best_minimum = _half(torch.zeros_like(low)), _half(mean)
    best_code = torch.zeros_like(groups, dtype=torch.uint8)
    for shrink in SHRINKS:
        scale = (high - low) * (shrink / 15)
        code = _codes(groups, scale, (high + low) / 2 - 7.5 * scale)
        spread = code - code.mean(dim=1, keepdim=True)
        scale = (spread * groups).sum(dim=1) * _inverse(spread.square().sum(dim=1)).squeeze(1)
        half_scale, half_minimum = _half(scale), _half(mean - scale * code.mean(dim=1))
        code = _codes(groups, half_scale.float(), half_minimum.float())
        error = (code * half_scale.float()[:, None] + half_minimum.float()[:, None] - groups).square().sum(dim=1)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, half_scale, best_scale)
        best_minimum = torch.where(better, half_minimum, best_minimum)
        best_code = torch.where(better[:, None], code.to(torch.uint8), best_code)
    return best_scale, best_minimum, best_code


def _codes(groups: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """[n, G] float32 from 0 to 15"""
    return ((groups - minimum[:, None]) * _inverse(scale)).round_().clamp_(0, 15)


def _inverse(numbers: Tensor) -> Tensor:
    """1 / numbers, [n, 1] float32; 0 where that isn't finite."""
    inverse = 1 / numbers.float()
    return torch.where(inverse.isfinite(), inverse, 0.0)[:, None]


def _half(numbers: Tensor) -> Tensor:
    """Convert to float16. Raises ValueError if a result isn't finite."""
    halves = numbers.to(torch.float16)
    if not bool(halves.isfinite().all()):
        raise ValueError("values are not finite, or too large for a float16 scale")
    return halves
