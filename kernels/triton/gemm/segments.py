"""Linear layers whose rows have several formats: in many GGUF files V has another one than Q and K.

Rows of one format are a segment, with a launch of its own, which writes its columns of the common result. All segments
have the same number of split-K partials: that of the largest segment.

Shapes as in linear.py; P split-K partials, N rows of all segments.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
import triton
from torch import Tensor

from pipeline.kernels.matrix import Matrix
from pipeline.kernels.triton.gemm import fused, linear
from pipeline.kernels.triton.gemm.device_matrix import DeviceMatrix, Quantization, kept_format
from pipeline.kernels.triton.gemm.tuned import SKINNY_TOKENS, GemmConfig, Op


@dataclass(frozen=True, slots=True)
class SegmentedMatrix:
    """A weight [N, K] on a device."""

    segments: tuple[DeviceMatrix, ...]
    """In the order of their rows; neighbours have different formats."""

    @staticmethod
    def of(
        matrices: Sequence[Matrix],
        dtype: torch.dtype,
        device: torch.device | str,
        quantization: Quantization | None = None,
        group: int = 0,
    ) -> "SegmentedMatrix":
        """Stack matrices with the same number of columns (see `DeviceMatrix.of`)."""
        runs = groupby(matrices, key=lambda matrix: kept_format(matrix.format))
        return SegmentedMatrix(tuple(DeviceMatrix.of(list(run), dtype, device, quantization, group) for _, run in runs))

    @property
    def num_rows(self) -> int:
        return sum(segment.num_rows for segment in self.segments)

    @property
    def num_columns(self) -> int:
        return self.segments[0].num_columns

    @property
    def has_codes(self) -> bool:
        return any(segment.form != "float" for segment in self.segments)

    @property
    def largest(self) -> DeviceMatrix:
        return max(self.segments, key=lambda segment: segment.num_rows)

    def configs(self, op: Op, num_tokens: int) -> list[GemmConfig]:
        """The launch of each segment by our own kernels; SwiGLU takes one segment."""
        split = linear.config_of(op, self.largest, num_tokens).split
        return [linear.config_of(op, segment, num_tokens, split) for segment in self.segments]

    def num_programs(self, op: Op, num_tokens: int) -> int:
        """Programs of all launches by our own kernels."""
        rows = [segment.num_rows // 2 if op == "swiglu" else segment.num_rows for segment in self.segments]
        configs = self.configs(op, num_tokens)
        return sum(triton.cdiv(num, config.block_n) * config.split for num, config in zip(rows, configs, strict=True))

    def parts_of(self, out: Tensor, bias: Tensor | None) -> Iterator[tuple[DeviceMatrix, Tensor, Tensor | None]]:
        """Each segment with its part of the result [..., N] and of the bias [N]."""
        ends = [0]
        for segment in self.segments:
            ends.append(ends[-1] + segment.num_rows)
        for segment, (begin, end) in zip(self.segments, pairwise(ends), strict=True):
            yield segment, out[..., begin:end], None if bias is None else bias[begin:end]


def num_split_k_partials(matrix: SegmentedMatrix, num_tokens: int) -> int:
    """P for `num_tokens` tokens. It does not change while serving."""
    return linear.num_split_k_partials(matrix.largest, num_tokens)


def split_k_partials_dtype(matrix: SegmentedMatrix, num_tokens: int) -> torch.dtype:
    """The dtype of the partials: float32 if there are several, else that of the activations."""
    return linear.split_k_partials_dtype(matrix.largest, num_tokens)


def segmented_linear(
    split_k_partials: Tensor,
    x: Tensor,
    matrix: SegmentedMatrix,
    bias: Tensor | None,
    wide: Tensor | None = None,
    *,
    pdl: bool = False,
) -> None:
    """As `linear.linear`. split_k_partials [P, M, N]"""
    for segment, out, part in matrix.parts_of(split_k_partials, bias):
        linear.linear(out, x, segment, part, wide, split=len(split_k_partials), pdl=pdl)


def segmented_norm_linear(
    partials_out: Tensor,
    residual_out: Tensor | None,
    residual_in: Tensor,
    partials_in: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    matrix: SegmentedMatrix,
    bias: Tensor | None,
    *,
    pdl: bool = False,
) -> None:
    """As `fused.norm_linear`. Each segment computes the norm, and writes the same residual."""
    assert len(residual_in) <= SKINNY_TOKENS
    inputs = residual_out, residual_in, partials_in, norm_weight, eps
    for segment, out, part in matrix.parts_of(partials_out, bias):
        config = linear.config_of("linear", segment, len(residual_in), len(partials_out))
        fused.norm_linear(out, *inputs, segment, part, config, pdl=pdl)
