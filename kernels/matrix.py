"""Converts stored matrices (kernels/stored_matrix.py, which describes the formats) in torch: dequantizes, quantizes.

Formulas and rounding are those of ggml's reference quantizers (`quantize_row_*_ref` in ggml-quants.c). The formats with
5 and 6 bits and the K-quants are only dequantized: files have them.

Shapes: N rows, K columns, G scales in a row: one for each 32 columns, in q6_k for each 16.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.kernels.stored_matrix import (
    BLOCK_BYTES,
    BLOCK_COLUMNS,
    GROUP,
    Format,
    StoredMatrix,
    row_bytes,
)

FLOATS: dict[Format, torch.dtype] = {"bf16": torch.bfloat16, "f32": torch.float32}

CHUNK_VALUES = 1 << 21
"""Values converted at once: 8 MiB as float32, and a few times that in temporaries."""


ZEROS: dict[Format, int] = {"q4_0": 8, "q5_0": 16, "q6_k": 32}
"""The code of zero, where a format has no minimums."""
HAS_MINIMUMS: tuple[Format, ...] = ("q4_1", "q5_1", "q4_k", "q5_k")


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
            values = rows.codes().view(*scale.shape[:2], -1).float().sub_(ZEROS.get(self.format, 0)).mul_(scale)
            if self.format in HAS_MINIMUMS:
                values += rows.minimums().float().unsqueeze(-1)
            out[part] = values.view(-1, self.num_columns)
        return out

    def take_rows(self, order: Tensor) -> "Matrix":
        """Row i of the result is row order[i]. order [M] int64."""
        return Matrix(self.format, self.data.index_select(0, order), len(order), self.num_columns)

    def scales(self) -> Tensor:
        """The scale of each group, [N, G]: float16, in the K-quants the exact product of two scales as float32.

        Raises ValueError if the format has none.
        """
        blocks = self._blocks()
        match self.format:
            case "q4_k" | "q5_k":
                scales = _halves_at(blocks, 0).float() * _six_bits(blocks)[0]
            case "q6_k":
                scales = _halves_at(blocks, 208).float() * blocks[:, :, 192:208].view(torch.int8)
            case _:
                scales = _halves_at(blocks, 0)
        return scales.reshape(self.num_rows, -1)

    def minimums(self) -> Tensor:
        """What is added to each group, [N, G]: `m` as float16, in the K-quants `-n * m`, which is exact, as float32.

        Raises ValueError unless the format has minimums.
        """
        match self.format:
            case "q4_1" | "q5_1":
                minimums = _halves_at(self._blocks(), 2)
            case "q4_k" | "q5_k":
                blocks = self._blocks()
                minimums = -_halves_at(blocks, 2).float() * _six_bits(blocks)[1]
            case _:
                raise ValueError(f"a {self.format} matrix has no minimums")
        return minimums.reshape(self.num_rows, -1)

    def small_scales(self) -> Tensor:
        """The two numbers of 8 bits that a K-quant has per 32 columns, [N, K / 32] int16 (the first in the lower byte).

        q4_k and q5_k: scale and minimum of 6 bits; q6_k: the signed scales of 16 columns each. Raises ValueError for
        other formats.
        """
        blocks = self._blocks()
        match self.format:
            case "q4_k" | "q5_k":
                pairs = torch.stack(_six_bits(blocks), dim=-1)
            case "q6_k":
                pairs = blocks[:, :, 192:208].contiguous()
            case _:
                raise ValueError(f"a {self.format} matrix has no scales of 8 bits")
        return pairs.view(self.num_rows, -1).view(torch.int16)

    def factors(self) -> Tensor:
        """What a K-quant multiplies the numbers of `small_scales` with, [N, K / 256]: q6_k d float16, else d and n, two
        float16 as an int32 (d in the lower half). Raises ValueError for other formats."""
        blocks = self._blocks()
        match self.format:
            case "q4_k" | "q5_k":
                return blocks[:, :, :4].contiguous().view(torch.int32).view(self.num_rows, -1)
            case "q6_k":
                return _halves_at(blocks, 208).view(self.num_rows, -1)
            case _:
                raise ValueError(f"a {self.format} matrix has no factors")

    def codes(self) -> Tensor:
        """The code of each value, [N, K] in the order of the columns: int8 for q8_0, otherwise uint8 of 4, 5 or 6 bits.

        Raises ValueError if the format has none.
        """
        blocks = self._blocks()
        steps = torch.arange(8, dtype=torch.uint8, device=self.data.device)
        match self.format:
            case "q8_0":
                codes = blocks[:, :, 2:].contiguous().view(torch.int8)
            case "q4_0" | "q4_1":
                codes = _nibbles(blocks[:, :, -16:], 16)
            case "q5_0" | "q5_1":
                bits = blocks[:, :, -20:-16].repeat_interleave(8, dim=-1) >> steps.repeat(4)
                codes = _nibbles(blocks[:, :, -16:], 16) | ((bits & 1) << 4)
            case "q4_k":
                codes = _nibbles(blocks[:, :, 16:], 32)
            case "q5_k":
                bits = blocks[:, :, None, 16:48] >> steps[:, None]
                codes = _nibbles(blocks[:, :, 48:], 32) | ((bits & 1) << 4).flatten(2)
            case "q6_k":
                pairs = blocks[:, :, 128:192].view(*blocks.shape[:2], 2, 1, 32)
                bits = pairs >> steps[::2, None]
                codes = _nibbles(blocks[:, :, :128], 64) | ((bits & 3) << 4).flatten(2)
        return codes.reshape(self.num_rows, self.num_columns)

    def _rows(self, part: slice) -> "Matrix":
        data = self.data[part]
        return Matrix(self.format, data, len(data), self.num_columns)

    def _blocks(self) -> Tensor:
        """[N, blocks, block bytes]"""
        if self.format in FLOATS:
            raise ValueError(f"a {self.format} matrix has no blocks")
        return self.data.view(self.num_rows, self.num_columns // BLOCK_COLUMNS[self.format], BLOCK_BYTES[self.format])


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


def quantize(values: Tensor, format: Format) -> Matrix:
    """A float matrix [N, K] in a format.

    Raises ValueError if blocks can't hold it: columns that aren't whole groups, values that aren't finite, a scale or
    minimum beyond float16. If a group's scale underflows in float16, the group becomes zero, or its minimum. Also
    raises ValueError for a format that is only dequantized.
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
            case _:
                raise ValueError(f"{format} is only dequantized")
        data[part] = blocks.view(-1, data.shape[1])
    return Matrix(format, data, num_rows, num_columns)


def _halves_at(blocks: Tensor, at: int) -> Tensor:
    """The float16 at a byte of each block: [N, blocks, 1]"""
    return blocks[:, :, at : at + 2].contiguous().view(torch.float16)


def _nibbles(pairs: Tensor, run: int) -> Tensor:
    """Codes of 4 bits: `run` bytes hold the next columns in their low halves, then as many in their high halves.

    pairs [N, blocks, n] uint8 → [N, blocks, 2 n]
    """
    runs = pairs.reshape(*pairs.shape[:2], -1, run)
    return torch.cat([runs & 0x0F, runs >> 4], dim=-1).flatten(2)


def _six_bits(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minimums of a K-quant's 8 groups, as in `get_scale_min_k4` of ggml-quants.c: [N, blocks, 8] each.

    Bytes 4 to 15 of a block: the first four scales, the first four minimums, and the lower halves of the others. The
    upper bits of the latter are those of the first eight bytes.
    """
    first, second, rest = blocks[:, :, 4:8], blocks[:, :, 8:12], blocks[:, :, 12:16]
    scales = torch.cat([first & 63, (rest & 0x0F) | (first >> 6 << 4)], dim=-1)
    return scales, torch.cat([second & 63, (rest >> 4) | (second >> 6 << 4)], dim=-1)


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
