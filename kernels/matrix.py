"""Converts stored matrices (kernels/stored_matrix.py, which describes the formats) in torch: dequantizes, joins,
quantizes.

Formulas and rounding are those of ggml's reference quantizers (`quantize_row_*_ref` in ggml-quants.c).

Shapes: N rows, K columns, G = K / 32 groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.kernels.stored_matrix import BLOCK_BYTES, GROUP, FloatFormat, Format, StoredMatrix, row_bytes

FLOATS: dict[Format, torch.dtype] = {"bf16": torch.bfloat16, "f32": torch.float32}

CHUNK_VALUES = 1 << 21
"""Values converted at once: 8 MiB as float32, and a few times that in temporaries."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight [N, K]. Raises ValueError if `data` doesn't match the format and the sizes."""

    format: Format
    data: Tensor
    """[N, K] bfloat16 or float32; for blocks [N, row_bytes] uint8, contiguous, a row after the other."""
    num_rows: int
    num_columns: int

    def __post_init__(self) -> None:
        if self.format in BLOCK_BYTES:
            expected, dtype = (self.num_rows, row_bytes(self.format, self.num_columns)), torch.uint8
        else:
            expected, dtype = (self.num_rows, self.num_columns), FLOATS[self.format]
        if self.data.shape != expected or self.data.dtype != dtype or not self.data.is_contiguous():
            raise ValueError(
                f"a {self.format} matrix of {self.num_rows} rows and {self.num_columns} columns is contiguous {dtype} "
                f"{list(expected)}, not {self.data.dtype} {list(self.data.shape)}"
            )

    def row_addresses(self) -> "np.ndarray[Any, np.dtype[np.uint64]]":
        """The address of each row in host memory, [N]. Valid while `data` lives."""
        stride = self.data.stride(0) * self.data.element_size()
        return self.data.data_ptr() + np.arange(self.num_rows, dtype=np.uint64) * np.uint64(stride)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The values, [N, K]. Blocks are computed in float32 and rounded once to `dtype`.

        Values that have that dtype already are not copied.
        """
        if self.format in FLOATS:
            return self.data.to(dtype)
        out = torch.empty(self.num_rows, self.num_columns, dtype=dtype)
        for part in _chunks(self.num_rows, self.num_columns):
            rows = self._rows(part)
            scale = rows.scales().float().unsqueeze(-1)
            code = rows.codes().view(*rows._groups(), GROUP).float()
            match self.format:
                case "q8_0":
                    values = code.mul_(scale)
                case "q4_0":
                    values = code.sub_(8.0).mul_(scale)
                case "q4_1":
                    values = code.mul_(scale).add_(rows.minimums().float().unsqueeze(-1))
            out[part] = values.view(-1, self.num_columns)
        return out

    def take_rows(self, order: Tensor) -> "Matrix":
        """Row i of the result is row order[i]. order [M] int64."""
        return Matrix(self.format, self.data.index_select(0, order), len(order), self.num_columns)

    def scales(self) -> Tensor:
        """`d` of each group, [N, G] float16. Raises ValueError if the format has none."""
        return self._blocks()[:, :, :2].contiguous().view(torch.float16).squeeze(-1)

    def minimums(self) -> Tensor:
        """`m` of each group, [N, G] float16. Raises ValueError unless the format is q4_1."""
        if self.format != "q4_1":
            raise ValueError(f"a {self.format} matrix has no minimums")
        return self._blocks()[:, :, 2:4].contiguous().view(torch.float16).squeeze(-1)

    def codes(self) -> Tensor:
        """`q` of each value, [N, K] in the order of the columns: int8 for q8_0, uint8 from 0 to 15 otherwise.

        Raises ValueError if the format has none.
        """
        blocks = self._blocks()
        if self.format == "q8_0":
            return blocks[:, :, 2:].contiguous().view(torch.int8).view(self.num_rows, self.num_columns)
        pairs = blocks[:, :, -GROUP // 2 :]
        return torch.cat([pairs & 0x0F, pairs >> 4], dim=-1).view(self.num_rows, self.num_columns)

    def _rows(self, part: slice) -> "Matrix":
        data = self.data[part]
        return Matrix(self.format, data, len(data), self.num_columns)

    def _groups(self) -> tuple[int, int]:
        return self.num_rows, self.num_columns // GROUP

    def _blocks(self) -> Tensor:
        """[N, G, block bytes]"""
        if self.format in FLOATS:
            raise ValueError(f"a {self.format} matrix has no blocks")
        return self.data.view(*self._groups(), BLOCK_BYTES[self.format])


def as_matrix(matrix: Matrix | StoredMatrix) -> Matrix:
    """A matrix in torch. The memory of a stored matrix is shared."""
    if isinstance(matrix, Matrix):
        return matrix
    data = torch.from_numpy(matrix.data.view(np.int16) if matrix.format == "bf16" else matrix.data)
    if matrix.format == "bf16":
        data = data.view(torch.bfloat16)
    return Matrix(matrix.format, data, matrix.num_rows, matrix.num_columns)


def as_tensor(values: "Tensor | np.ndarray[Any, np.dtype[np.float32]]") -> Tensor:
    """A tensor of the same values. The memory of an array is shared."""
    return values if isinstance(values, Tensor) else torch.from_numpy(values)


def join(matrices: Sequence[Matrix], mixed: FloatFormat = "bf16") -> Matrix:
    """Stack matrices with the same number of columns. If their formats differ, the result is in format `mixed`.

    Raises ValueError if their columns differ. A single matrix is returned unchanged.
    """
    if len({matrix.num_columns for matrix in matrices}) != 1:
        raise ValueError(f"matrices to join have {[matrix.num_columns for matrix in matrices]} columns")
    if len(matrices) == 1:
        return matrices[0]
    num_rows = sum(matrix.num_rows for matrix in matrices)
    if len({matrix.format for matrix in matrices}) == 1:
        format, data = matrices[0].format, torch.cat([matrix.data for matrix in matrices])
    else:
        format, data = mixed, torch.cat([matrix.dequantize(FLOATS[mixed]) for matrix in matrices])
    return Matrix(format, data, num_rows, matrices[0].num_columns)


def quantize(values: Tensor, format: Format) -> Matrix:
    """A float matrix [N, K] in a format.

    Raises ValueError if blocks can't hold it: columns that aren't whole groups, values that aren't finite, a scale or
    minimum beyond float16. If a group's scale underflows in float16, the group becomes zero, or its minimum.
    """
    num_rows, num_columns = values.shape
    if format in FLOATS:
        return Matrix(format, values.to(FLOATS[format]).contiguous(), num_rows, num_columns)
    data = torch.empty(num_rows, row_bytes(format, num_columns), dtype=torch.uint8)
    for part in _chunks(num_rows, num_columns):
        groups = values[part].float().reshape(-1, GROUP)
        match format:
            case "q8_0":
                blocks = _to_q8_0(groups)
            case "q4_0":
                blocks = _to_q4_0(groups)
            case "q4_1":
                blocks = _to_q4_1(groups)
        data[part] = blocks.view(-1, data.shape[1])
    return Matrix(format, data, num_rows, num_columns)


def _to_q8_0(groups: Tensor) -> Tensor:
    """[n, 32] float32 → [n, 34] uint8"""
    scale = groups.abs().amax(dim=1, keepdim=True) / 127
    head = _halves(scale)
    scaled = groups * _inverse(scale)
    whole = scaled.trunc()
    rounded = whole + (2 * (scaled - whole)).trunc()  # halves away from zero, as C's roundf
    return torch.cat([head, rounded.to(torch.int8).view(torch.uint8)], dim=1)


def _to_q4_0(groups: Tensor) -> Tensor:
    """[n, 32] float32 → [n, 18] uint8. The number farthest from zero is code 0, so the scale has the opposite sign."""
    farthest = groups.gather(1, groups.abs().argmax(dim=1, keepdim=True))
    scale = farthest / -8
    head = _halves(scale)
    code = (groups * _inverse(scale) + 8.5).to(torch.uint8).clamp_(max=15)
    return torch.cat([head, _pairs(code)], dim=1)


def _to_q4_1(groups: Tensor) -> Tensor:
    """[n, 32] float32 → [n, 20] uint8"""
    minimum = groups.amin(dim=1, keepdim=True)
    scale = (groups.amax(dim=1, keepdim=True) - minimum) / 15
    head = torch.cat([_halves(scale), _halves(minimum)], dim=1)
    code = ((groups - minimum) * _inverse(scale) + 0.5).to(torch.uint8).clamp_(max=15)
    return torch.cat([head, _pairs(code)], dim=1)


def _inverse(scale: Tensor) -> Tensor:
    """1 / scale; 0 where that isn't finite, where the scale underflows in float16."""
    inverse = 1 / scale
    return torch.where(inverse.isfinite(), inverse, 0.0)


def _halves(numbers: Tensor) -> Tensor:
    """[n, 1] float32 → [n, 2] uint8, as float16. Raises ValueError where a number isn't finite as one."""
    halves = numbers.to(torch.float16)
    if not bool(halves.isfinite().all()):
        raise ValueError("values are not finite, or too large for a float16 scale")
    return halves.view(torch.uint8)


def _pairs(code: Tensor) -> Tensor:
    """[n, 32] codes below 16 → [n, 16] bytes"""
    return code[:, : GROUP // 2] | (code[:, GROUP // 2 :] << 4)


def _chunks(num_rows: int, num_columns: int) -> list[slice]:
    """Rows to convert at once."""
    step = max(1, CHUNK_VALUES // num_columns)
    return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]
