"""The weight of a linear layer in GPU memory: floats, or planes of codes, scales and minimums.

In the blocks of files (kernels/stored_matrix.py) a scale precedes every 32 codes, so loads of 16 bytes are not aligned
to them. Here codes are contiguous, and so are scales:

    format       group       codes                    w =
    bf16, f32    –           –                        the number itself
    q8_0, int8   32; 128     int8 [N, K]              scale * q
    q4_0         32          uint8 [N, K / 2]         scale * (q - 8)
    q4_1, int4   32; 128     uint8 [N, K / 2]         scale * q + minimum

With 4 bits, byte i of a group of G columns holds column i in its low half and column i + G / 2 in its high half: one
tile of bytes gives two tiles of a matmul without interleaving.

int8 and int4 are quantized here from floats when a model is loaded. Their groups have 128 columns, or 64 or 32 if 128
does not divide the columns. If 32 does not either, the last group is padded with zeros.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pipeline.kernels.matrix import FLOATS, Matrix
from pipeline.kernels.stored_matrix import BLOCK_BYTES, GPU_FORMATS, GROUP

Quantization = Literal["int8", "int4"]
Form = Literal["float", "int8", "int4"]

GROUPS = (128, 64, 32)
CHUNK_VALUES = 1 << 26
"""Values quantized at once: 256 MiB as float32, and a few times that in temporaries."""
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7)
"""Fractions of a group's range to try for int4's 16 codes: a smaller range clips extremes, but has finer steps."""
Q4_0_ZERO = 8
"""The code of zero in q4_0."""


@dataclass(frozen=True, slots=True)
class DeviceMatrix:
    """A weight [N, K] on a device, and the dtype of its activations."""

    form: Form
    """How values are stored: as floats, in bytes, or in half bytes."""
    values: Tensor
    """float: [N, K] of `dtype`; int8: int8 [N, P]; int4: uint8 [N, P / 2]. P is K, padded to whole groups."""
    scales: Tensor | None
    """[N, P / group] float16"""
    minimums: Tensor | None
    """likewise, or None if they are zero"""
    zero: int
    """Subtracted from a code before scaling."""
    group: int
    """Columns per scale; 0 for floats."""
    dtype: torch.dtype
    num_rows: int
    num_columns: int

    @property
    def num_bytes(self) -> int:
        """Bytes that a matmul reads."""
        planes = [plane for plane in (self.values, self.scales, self.minimums) if plane is not None]
        return sum(plane.numel() * plane.element_size() for plane in planes)

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def format(self) -> str:
        """The name in tables of launches: bf16, f16, f32, int8g128, int4g32 …"""
        if self.form == "float":
            return {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}[self.dtype]
        return f"{self.form}g{self.group}"

    @staticmethod
    def of(
        matrices: Sequence[Matrix],
        dtype: torch.dtype,
        device: torch.device | str,
        quantization: Quantization | None = None,
    ) -> "DeviceMatrix":
        """Stack matrices with the same number of columns.

        Blocks of `GPU_FORMATS` keep them if all matrices have the same one. Everything else becomes `dtype` or
        `quantization`.
        Raises ValueError if columns differ, or if values to quantize aren't finite or are too large.
        """
        num_columns = matrices[0].num_columns
        if any(matrix.num_columns != num_columns for matrix in matrices):
            raise ValueError(f"matrices to join have {[matrix.num_columns for matrix in matrices]} columns")
        formats = {matrix.format for matrix in matrices}
        if len(formats) == 1 and formats <= GPU_FORMATS:
            return _join([_planes(matrix, dtype, device) for matrix in matrices])
        return _join([_floats(matrix, dtype, torch.device(device), quantization) for matrix in matrices])

    def dequantize(self) -> Tensor:
        """The values, [N, K] float32, in a new tensor; for tests and comparisons."""
        if self.scales is None:
            return self.values.float()
        codes = self.values
        if self.form == "int4":
            pairs = codes.view(self.num_rows, -1, self.group // 2)
            codes = torch.cat([pairs & 0x0F, pairs >> 4], dim=-1)
        wide = codes.view(self.num_rows, -1, self.group).float() - self.zero
        wide *= self.scales.float()[:, :, None]
        if self.minimums is not None:
            wide += self.minimums.float()[:, :, None]
        return wide.view(self.num_rows, -1)[:, : self.num_columns].contiguous()


def _join(parts: Sequence[DeviceMatrix]) -> DeviceMatrix:
    first = parts[0]
    if len(parts) == 1:
        return first
    scales = None if first.scales is None else torch.cat([part.scales for part in parts if part.scales is not None])
    minimums = [part.minimums for part in parts if part.minimums is not None]
    return DeviceMatrix(
        form=first.form,
        values=torch.cat([part.values for part in parts]),
        scales=scales,
        minimums=torch.cat(minimums) if minimums else None,
        zero=first.zero,
        group=first.group,
        dtype=first.dtype,
        num_rows=sum(part.num_rows for part in parts),
        num_columns=first.num_columns,
    )


def _planes(matrix: Matrix, dtype: torch.dtype, device: torch.device | str) -> DeviceMatrix:
    """A matrix in blocks, split into planes on the device."""
    there = Matrix(matrix.format, matrix.data.to(device), matrix.num_rows, matrix.num_columns)
    if matrix.format == "q8_0":
        values = there.codes()
    else:
        blocks = there.data.view(matrix.num_rows, -1, BLOCK_BYTES[matrix.format])
        values = blocks[:, :, -GROUP // 2 :].reshape(matrix.num_rows, -1)
    return DeviceMatrix(
        form="int8" if matrix.format == "q8_0" else "int4",
        values=values,
        scales=there.scales(),
        minimums=there.minimums() if matrix.format == "q4_1" else None,
        zero=Q4_0_ZERO if matrix.format == "q4_0" else 0,
        group=GROUP,
        dtype=dtype,
        num_rows=matrix.num_rows,
        num_columns=matrix.num_columns,
    )


def _floats(
    matrix: Matrix, dtype: torch.dtype, device: torch.device, quantization: Quantization | None
) -> DeviceMatrix:
    shape = matrix.num_rows, matrix.num_columns
    if quantization is None:
        values = matrix.data.to(device).to(dtype) if matrix.format in FLOATS else matrix.dequantize(dtype).to(device)
        return DeviceMatrix("float", values.contiguous(), None, None, 0, 0, dtype, *shape)
    group = next((group for group in GROUPS if matrix.num_columns % group == 0), GROUPS[-1])
    chunks = []
    step = max(1, CHUNK_VALUES // matrix.num_columns)
    for begin in range(0, matrix.num_rows, step):
        data = matrix.data[begin : begin + step]
        wide = Matrix(matrix.format, data, len(data), matrix.num_columns)
        numbers = data.to(device).float() if matrix.format in FLOATS else wide.dequantize(torch.float32).to(device)
        chunks.append(_quantize(numbers, group, quantization, dtype))
    return _join(chunks)


def _quantize(numbers: Tensor, group: int, quantization: Quantization, dtype: torch.dtype) -> DeviceMatrix:
    """numbers [n, K] float32"""
    num_rows, num_columns = numbers.shape
    filled = torch.nn.functional.pad(numbers, (0, -num_columns % group))
    groups = filled.view(-1, group)
    minimum = None
    if quantization == "int8":
        scale, code = to_int8(groups)
    else:
        scale, minimum, code = to_int4(groups)
        pairs = code.view(-1, 2, group // 2)
        code = pairs[:, 0] | (pairs[:, 1] << 4)
    return DeviceMatrix(
        form=quantization,
        values=code.view(num_rows, -1),
        scales=scale.view(num_rows, -1),
        minimums=None if minimum is None else minimum.view(num_rows, -1),
        zero=0,
        group=group,
        dtype=dtype,
        num_rows=num_rows,
        num_columns=num_columns,
    )


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
