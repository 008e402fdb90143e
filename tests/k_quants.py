"""Quantizes to every format that the CPU library reads, for tests: files have K-quants, and no package writes them.

The encoders here choose scales in the simplest way. What tests need of them are all possible codes and scales, and
values that are near the original ones.
"""

import gguf
import numpy as np
import torch
from torch import Tensor

from pipeline.kernels import matrix as matrix_module
from pipeline.kernels.matrix import Matrix
from pipeline.kernels.stored_matrix import FP8_GROUP, SUPER_BLOCK, Format

KINDS = {"q5_0": gguf.GGMLQuantizationType.Q5_0, "q5_1": gguf.GGMLQuantizationType.Q5_1}


def quantize(values: Tensor, format: Format) -> Matrix:
    """A float matrix [N, K] in any format. K is a multiple of 32, for fp8 of 128, for K-quants of 256."""
    if format in KINDS:
        blocks = gguf.quantize(values.float().numpy(), KINDS[format])
    elif format == "q4_k" or format == "q5_k":
        blocks = _with_minimums(_super_blocks(values), bits=4 if format == "q4_k" else 5)
    elif format == "q6_k":
        blocks = _q6_k(_super_blocks(values))
    elif format == "fp8":
        blocks = _fp8(values.float().reshape(-1, FP8_GROUP))
    else:
        return matrix_module.quantize(values, format)
    return Matrix(format, torch.from_numpy(blocks.reshape(len(values), -1)), *values.shape)


def _fp8(blocks: Tensor) -> np.ndarray:
    """[n, 128] float32 → [n, 132] uint8"""
    scale = blocks.abs().amax(1, keepdim=True) / 448
    codes = (blocks / scale.clamp(min=1e-30)).to(torch.float8_e4m3fn)
    return torch.cat([scale.view(torch.uint8), codes.view(torch.uint8)], dim=1).numpy()


def _super_blocks(values: Tensor) -> np.ndarray:
    return values.float().numpy().reshape(-1, SUPER_BLOCK)


def _with_minimums(blocks: np.ndarray, bits: int) -> np.ndarray:
    """[n, 256] float32 → [n, 144 or 176] uint8: groups of 32 with scales and minimums of 6 bits."""
    groups = blocks.reshape(-1, 8, 32)
    low = np.minimum(groups.min(2), 0)
    halves, small = [], []
    for steps in ((groups.max(2) - low) / (2**bits - 1), -low):
        half = (steps.max(1) / 63).astype(np.float16)
        halves.append(half)
        small.append(np.rint(steps * _inverse(half)[:, None]).clip(0, 63).astype(np.uint8))
    (d, n), (s, m) = halves, small
    scale, minimum = (half.astype(np.float32)[:, None] * few for half, few in ((d, s), (n, m)))
    codes = np.rint((groups + minimum[..., None]) * _inverse(scale)[..., None])
    codes = codes.clip(0, 2**bits - 1).astype(np.uint8)
    packed = np.concatenate(
        [
            s[:, :4] | (s[:, 4:] >> 4 << 6),
            m[:, :4] | (m[:, 4:] >> 4 << 6),
            (s[:, 4:] & 15) | (m[:, 4:] & 15) << 4,
        ],
        axis=1,
    )
    parts = [np.stack([d, n], axis=1).view(np.uint8), packed]
    if bits == 5:
        parts.append(((codes >> 4) << np.arange(8, dtype=np.uint8)[:, None]).sum(1, dtype=np.uint8))
    parts.append(_nibble_pairs(codes.reshape(len(blocks), -1), 32))
    return np.concatenate(parts, axis=1)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    """[n, 256] float32 → [n, 210] uint8: groups of 16 with signed scales of 8 bits."""
    groups = blocks.reshape(-1, 16, 16)
    farthest = np.take_along_axis(groups, np.abs(groups).argmax(2)[..., None], 2)[..., 0]
    steps = farthest / -32  # the number farthest from zero is the code 0
    d = (np.abs(steps).max(1) / 127).astype(np.float16)
    s = np.rint(steps * _inverse(d)[:, None]).clip(-128, 127).astype(np.int8)
    scale = d.astype(np.float32)[:, None] * s
    codes = (np.rint(groups * _inverse(scale)[..., None]).clip(-32, 31) + 32).astype(np.uint8)
    flat = codes.reshape(len(blocks), -1)
    above = (flat >> 4).reshape(-1, 2, 4, 32) << np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    pairs = above.sum(2, dtype=np.uint8).reshape(len(blocks), -1)
    return np.concatenate([_nibble_pairs(flat, 64), pairs, s.view(np.uint8), d[:, None].view(np.uint8)], axis=1)


def _nibble_pairs(codes: np.ndarray, run: int) -> np.ndarray:
    """The lower four bits of [n, 256]: `run` columns in low halves, the next as many in high halves → [n, 128]"""
    pairs = (codes & 15).reshape(len(codes), -1, 2, run)
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(len(codes), -1)


def _inverse(numbers: np.ndarray) -> np.ndarray:
    wide = numbers.astype(np.float32)
    return np.divide(1, wide, out=np.zeros_like(wide), where=wide != 0)
