"""What the ops of the CPU library compute, in numpy: activations and weights in each format, and their products."""

import functools
from dataclasses import dataclass

import numpy as np
import torch

from pipeline.kernels.cpu import native
from pipeline.kernels.cpu.native import ActivationForm
from pipeline.kernels.matrix import HAS_MINIMUMS, Matrix
from pipeline.kernels.stored_matrix import BLOCK_COLUMNS, FP8_GROUP, Format
from tests.k_quants import quantize

FORMATS: list[Format] = ["bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k"]
GROUP = 32
PANEL = 16
EPS = 2.0**-24
"""The largest relative error of one rounding to float32."""
TINY = 1e-30
"""Absolute error for numbers below the range of float32."""


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Rounded to bfloat16, as float32."""
    return torch.from_numpy(np.ascontiguousarray(values, np.float32)).bfloat16().float().numpy()


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """Rounded to bfloat16, as uint16."""
    words: np.ndarray = (to_bf16(values).view(np.uint32) >> 16).astype(np.uint16)
    return words


def upcast(words: np.ndarray) -> np.ndarray:
    """bfloat16 as uint16, as float32."""
    return (words.astype(np.uint32) << 16).view(np.float32)


def random(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


@functools.cache
def random_matrix(seed: int, rows: int, columns: int, format: Format, scale: float = 0.3) -> Matrix:
    """Weights whose groups differ in size and in offset, so that minimums matter. Cached, because every test needs the
    same ones for each instruction set."""
    values = random(seed, rows, columns, scale=scale)
    values += random(seed + 1, rows, columns // 16 + 1, scale=scale).repeat(16, axis=1)[:, :columns]
    return quantize(torch.from_numpy(values), format)


def whole(columns: int, format: Format) -> int:
    """At least so many columns, in whole blocks."""
    block = BLOCK_COLUMNS.get(format, 1)
    return -(-columns // block) * block


def exact(matrix: Matrix) -> np.ndarray:
    """The values of a matrix, float64."""
    return matrix.dequantize(torch.float32).double().numpy()


@dataclass(frozen=True, slots=True)
class ActivationArray:
    """Activations as an op writes them for a product, or as a test sets them."""

    values: np.ndarray
    """[rows, width] float64: what the product reads, codes times scales if it has them"""
    codes: np.ndarray
    scales: np.ndarray
    largest: int = 0
    """Largest possible code"""


SUMMED = (ActivationForm.BYTES, ActivationForm.SPLIT)
"""Forms with the sums of their groups."""
MOST = {
    ActivationForm.BYTES: (127, np.int8),
    ActivationForm.SPLIT: (2047, np.int16),
    ActivationForm.WORDS: (32767, np.int16),
}
"""The largest code of each form with groups, and the type of its codes here."""
BLOCK = 256
MOST_BLOCK_CODE = 127 * 257
MOST_BLOCK_SUM = 2**19
"""Of the magnitudes of 64 codes of `ActivationForm.BLOCKS`"""


def read_floats(rows: native.NativeRows, num: int, width: int) -> np.ndarray:
    return np.ascontiguousarray(rows.memory[:num, : 4 * width]).view(np.float32)


def split(codes: np.ndarray) -> np.ndarray:
    """Codes of 12 bits [N, K] as `ActivationForm.SPLIT` stores them: [N, 2 K] int8."""
    groups = codes.reshape(len(codes), -1, GROUP)
    return np.concatenate([groups >> 4, groups & 15], axis=-1).astype(np.int8).reshape(len(codes), -1)


def joined(halves: np.ndarray) -> np.ndarray:
    """The codes [N, K] int16 that `split` has split."""
    groups = halves.reshape(len(halves), -1, 2 * GROUP).astype(np.int16)
    assert groups[..., GROUP:].min(initial=0) >= 0 and groups[..., GROUP:].max(initial=0) < 16
    return (groups[..., :GROUP] * 16 + groups[..., GROUP:]).reshape(len(halves), -1)


def bases_of(codes: np.ndarray) -> np.ndarray:
    """What the sums of products of codes [N, K] with those of q6_k start with: for each half of a group, [N, K / 16]
    float32."""
    sums = codes.reshape(len(codes), -1, GROUP // 2).sum(-1, dtype=np.int32).astype(np.float32)
    bases: np.ndarray = 1.5 * 2**23 - 32 * sums
    return bases


def quantize_rows(values: np.ndarray, form: ActivationForm) -> tuple[np.ndarray, np.ndarray]:
    """Codes [N, K] int8 or int16 (of 12 bits if split) and scales [N, K / 32] float32, rounded as
    quantize() in matrix.h writes it down."""
    groups = values.reshape(len(values), -1, GROUP)
    tops = np.abs(groups).max(-1)
    most, dtype = MOST[form]
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(tops > np.float32(1e-30), np.float32(most) / tops, np.float32(0))
    codes = np.rint(groups * inverse[..., None]).astype(dtype)
    return codes.reshape(values.shape), tops / np.float32(most)


def quantize_blocks(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes [N, K] int16 and scales [N, K / 256] float32 of `ActivationForm.BLOCKS`, rounded as
    quantize_blocks() in matrix.h."""
    blocks = values.reshape(len(values), -1, BLOCK)
    parts = np.abs(blocks).reshape(*blocks.shape[:2], 4, 4, 16)
    sums = ((parts[..., 0, :] + parts[..., 1, :]) + parts[..., 2, :]) + parts[..., 3, :]
    for half in (8, 4, 2, 1):
        sums = sums[..., :half] + sums[..., half:]
    tops = np.abs(blocks).max(-1)
    scales = np.maximum(tops / np.float32(MOST_BLOCK_CODE), sums[..., 0].max(-1) / np.float32(MOST_BLOCK_SUM - 64))
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(tops > np.float32(1e-30), np.float32(1) / scales, np.float32(0))
    return np.rint(blocks * inverse[..., None]).astype(np.int16).reshape(values.shape), scales


def product(kept: ActivationArray, matrix: Matrix) -> tuple[np.ndarray, np.ndarray]:
    """The exact product, [N, outputs] float64, and its float32 error bound.

    One accumulator adds n terms in order, and each term has at most two roundings: the error is at most (n + 2) EPS
    times the sum of their magnitudes (Higham, "Accuracy and Stability", 2002, section 3.1). With bf16 weights a term is
    one product. Otherwise it is the sum of a group, which is exact before it is scaled as a float, or of the group's
    minimum. The sums of q6_k have scales of their own, and are those of half a group, of 16.
    With fp8, the sums of 128 products are scaled and added up.
    """
    weights = exact(matrix)
    out = kept.values @ weights.T
    if matrix.format in ("bf16", "fp8"):
        scaled = matrix.num_columns // FP8_GROUP + 1 if matrix.format == "fp8" else 0
        return out, (matrix.num_columns + 2 + scaled) * EPS * (np.abs(kept.values) @ np.abs(weights).T) + TINY
    size = GROUP // 2 if matrix.format == "q6_k" else GROUP
    num, groups = len(kept.values), matrix.num_columns // size
    minimums = np.zeros((matrix.num_rows, groups))
    if matrix.format in HAS_MINIMUMS:
        minimums = matrix.minimums().double().numpy()
    above = weights.reshape(-1, groups, size) - minimums[..., None]
    values = kept.values.reshape(num, groups, size)
    magnitude = np.abs(values.transpose(1, 0, 2) @ above.transpose(1, 2, 0)).sum(0)
    magnitude += np.abs(values.sum(-1)) @ np.abs(minimums).T
    return out, (2 * groups + 5) * EPS * magnitude + TINY
