"""The weight of a linear layer in GPU memory: floats, or planes of codes and scales.

In the blocks of files (kernels/stored_matrix.py) scales are between the codes, so loads of 16 bytes are not aligned to
them. Here each plane is contiguous:

    format       group    values             high              scales           w =
    bf16, f32    –        [N, K]             –                 –                the number itself
    q8_0, int8   32; 128  int8 [N, K]        –                 f16              s * q
    fp8          128      uint8 [N, K]       –                 f32              s * e4m3
    q4_0         32       uint8 [N, K / 2]   –                 f16              s * (q - 8)
    q4_1, int4   32; 128  uint8 [N, K / 2]   –                 f16, minimums    s * q + m
    q5_0         32       uint8 [N, K / 2]   1 bit a code      f16              s * (q - 16)
    q5_1         32       uint8 [N, K / 2]   1 bit a code      f16, minimums    s * q + m
    q4_k, q5_k   32       uint8 [N, K / 2]   q5_k: 1 bit       2 × 8 bits       d * s * q - n * m
    q6_k         16       uint8 [N, K / 2]   2 bits a code     2 × 8 bits       d * s * (q - 32)

With 4 to 6 bits, byte i of a group of G columns holds the lower four bits of column i in its low half and those of
column i + G / 2 in its high half: one tile of bytes gives two tiles of a matmul without interleaving.

`high` has the bits above: int32 [N, K / 32, bits], so that a shift and a mask give those of four columns, each in the
byte of its column. Column c of a group, in its half h at place i = c % 16, has

    1 bit     of the group's word: bit 8 * (i % 4) + i / 4 + 4 * h
    2 bits    of word h: from bit 8 * (i % 4) + 2 * (i / 4) on

K-quants have a pair of scales of 8 bits per 32 columns (`scales`, int16): scale and minimum, or in q6_k the scales of
16 columns each. `factors` has what multiplies them, per 256 columns: d and n, two float16 in an int32; in q6_k d.
Memory is that of the file; q4_k has 2.8 % more and q5_k 2.3 %, because scales of 6 bits take 8.

fp8 checkpoints have a scale for the weight, a row or a block of 128 rows and columns; here it is repeated for each row
and 128 columns. Codes of NaN are not allowed.

int8 and int4 are quantized here from floats when a model is loaded. Their groups have 128 columns, or 64 or 32 if 128
does not divide the columns. If 32 does not either, the last group is padded with zeros.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from triton.language import constexpr

from pipeline.kernels.matrix import FLOATS, HAS_MINIMUMS, ZEROS, Matrix
from pipeline.kernels.stored_matrix import GPU_BLOCK_BYTES, GROUP, SUPER_BLOCK, Format
from pipeline.kernels.triton.gemm.planes import Planes
from pipeline.kernels.triton.gemm.quantize import to_int4, to_int8

Quantization = Literal["int8", "int4"]
Storage = Literal["float", "int8", "int4", "fp8"]
Scales = Literal["one", "scale and minimum", "two"]
"""What a group has: a scale; a scale and a minimum of 8 bits, or a scale of 8 bits for each half, and their factors."""

GROUPS = (128, 64, 32)
CHUNK_VALUES = 1 << 26
"""Values quantized at once: 256 MiB as float32, and a few times that in temporaries."""
HIGH_BITS: dict[Format, int] = {"q5_0": 1, "q5_1": 1, "q5_k": 1, "q6_k": 2}
"""Bits of a code above its lower four."""
K_QUANTS: tuple[Format, ...] = ("q4_k", "q5_k", "q6_k")
FP8_GROUP = 128


@dataclass(frozen=True, slots=True)
class DeviceMatrix:
    """A weight [N, K] on a device, and the dtype of its activations."""

    form: Storage
    """How values are stored: as floats, in bytes, or in half bytes with `high` for the other bits."""
    values: Tensor
    """float: [N, K] of `dtype`; int8: int8 [N, P]; fp8: uint8 [N, P]; int4: uint8 [N, P / 2]. P is K, padded to whole
    groups."""
    scales: Tensor | None
    """[N, P / group] float16; fp8: float32; int16 pairs with `factors`"""
    minimums: Tensor | None
    """[N, P / group] float16, or None if the format has none or they are in `scales`"""
    zero: int
    """Subtracted from a code before scaling."""
    group: int
    """Columns per scale, or per pair of them; 0 for floats."""
    dtype: torch.dtype
    num_rows: int
    num_columns: int
    high: Tensor | None = None
    """[N, P / 32, bits] int32"""
    factors: Tensor | None = None
    """[N, P / 256] int32, or float16 if the pairs are two scales"""

    @property
    def num_bytes(self) -> int:
        """Bytes that a matmul reads."""
        planes = [self.values, self.high, self.scales, self.minimums, self.factors]
        return sum(plane.numel() * plane.element_size() for plane in planes if plane is not None)

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def high_bits(self) -> int:
        return 0 if self.high is None else self.high.shape[2]

    @property
    def format(self) -> str:
        """The name in tables of launches: bf16, f16, f32, int8g128, int5g32, q4_k …"""
        if self.form == "float":
            return {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}[self.dtype]
        if self.factors is not None:
            return f"q{4 + self.high_bits}_k"
        return f"int{4 + self.high_bits}g{self.group}" if self.form == "int4" else f"{self.form}g{self.group}"

    @property
    def scales_kind(self) -> Scales:
        if self.factors is None:
            return "one"
        return "scale and minimum" if self.factors.dtype == torch.int32 else "two"

    def planes(self, *, words: bool = False) -> Planes:
        """The argument of kernels. With `words`, codes are int32."""
        return Planes(
            data=self.values.view(torch.int32) if words and self.form != "float" else self.values,
            high=self.high,
            scales=self.scales,
            minimums=self.minimums,
            factors=self.factors,
            FORM=constexpr(self.form),
            STRIDE=constexpr(self.values.shape[1]),
            GROUP=constexpr(self.group),
            NUM_GROUPS=constexpr(0 if self.scales is None else self.scales.shape[1]),
            ZERO=constexpr(self.zero),
            HIGH_BITS=constexpr(self.high_bits),
            SCALES=constexpr(self.scales_kind),
            HAS_MINIMUMS=constexpr(self.minimums is not None or self.scales_kind == "scale and minimum"),
        )

    @staticmethod
    def of(
        matrices: Sequence[Matrix],
        dtype: torch.dtype,
        device: torch.device | str,
        quantization: Quantization | None = None,
        group: int = 0,
    ) -> "DeviceMatrix":
        """Stack matrices with the same number of columns.

        Blocks keep their format, floats become `dtype` or `quantization`, in groups of `group` columns or `group_of`.
        Raises ValueError if columns or formats of blocks differ, or if values to quantize aren't finite or too large.
        """
        num_columns = matrices[0].num_columns
        if any(matrix.num_columns != num_columns for matrix in matrices):
            raise ValueError(f"matrices to join have {[matrix.num_columns for matrix in matrices]} columns")
        formats = {kept_format(matrix.format) for matrix in matrices}
        if len(formats) > 1:
            raise ValueError(f"matrices to join have the formats {[matrix.format for matrix in matrices]}")
        if formats == {None}:
            return _join([_floats(matrix, dtype, torch.device(device), quantization, group) for matrix in matrices])
        return _join([_from_blocks(matrix, dtype, device) for matrix in matrices])

    def dequantize(self) -> Tensor:
        """The values, [N, K] float32, in a new tensor; for tests and comparisons."""
        if self.scales is None:
            return self.values.float()
        half = self.group // 2
        codes = self.values.view(torch.float8_e4m3fn) if self.form == "fp8" else self.values
        if self.form == "int4":
            pairs = codes.view(self.num_rows, -1, half)
            codes = torch.cat([pairs & 0x0F, pairs >> 4], dim=-1)
            if self.high is not None:
                codes = codes | (_high_codes(self.high) << 4)
        wide = codes.view(self.num_rows, -1, self.group).float() - self.zero
        scales, minimums = self._wide_scales()
        wide *= scales
        if minimums is not None:
            wide += minimums
        return wide.view(self.num_rows, -1)[:, : self.num_columns].contiguous()

    def _wide_scales(self) -> tuple[Tensor, Tensor | None]:
        """Scales and minimums that broadcast to [N, groups, G], float32."""
        assert self.scales is not None
        if self.factors is None:
            return self.scales.float()[:, :, None], None if self.minimums is None else self.minimums.float()[:, :, None]
        pairs = self.scales.view(torch.uint8).view(*self.scales.shape, 2)
        factors = self.factors.repeat_interleave(SUPER_BLOCK // GROUP, dim=1)
        if self.scales_kind == "two":
            each = factors.float()[:, :, None] * pairs.view(torch.int8).float()
            return each.repeat_interleave(GROUP // 2, dim=2), None
        halves = factors.view(torch.float16).view(*self.scales.shape, 2).float() * pairs
        return halves[:, :, :1], -halves[:, :, 1:]


def kept_format(format: Format) -> Format | None:
    """The format of blocks that stay as they are; None for what becomes floats."""
    return format if format in GPU_BLOCK_BYTES else None


def group_of(num_columns: int) -> int:
    """Columns with a common scale where floats are quantized."""
    return next((group for group in GROUPS if num_columns % group == 0), GROUPS[-1])


def _join(parts: Sequence[DeviceMatrix]) -> DeviceMatrix:
    first = parts[0]
    if len(parts) == 1:
        return first

    def joined(planes: Sequence[Tensor | None]) -> Tensor | None:
        found = [plane for plane in planes if plane is not None]
        return torch.cat(found) if found else None

    return replace(
        first,
        values=torch.cat([part.values for part in parts]),
        scales=joined([part.scales for part in parts]),
        minimums=joined([part.minimums for part in parts]),
        high=joined([part.high for part in parts]),
        factors=joined([part.factors for part in parts]),
        num_rows=sum(part.num_rows for part in parts),
    )


def _from_blocks(matrix: Matrix, dtype: torch.dtype, device: torch.device | str) -> DeviceMatrix:
    """A matrix in blocks, split into planes on the device, some rows at a time."""
    step = max(1, CHUNK_VALUES // matrix.num_columns)
    parts = []
    for begin in range(0, matrix.num_rows, step):
        data = matrix.data[begin : begin + step].to(device)
        parts.append(_planes(Matrix(matrix.format, data, len(data), matrix.num_columns), dtype))
    return _join(parts)


def _planes(matrix: Matrix, dtype: torch.dtype) -> DeviceMatrix:
    format, shape = matrix.format, (matrix.num_rows, matrix.num_columns)
    if format == "q8_0":
        return DeviceMatrix("int8", matrix.codes(), matrix.scales(), None, 0, GROUP, dtype, *shape)
    if format == "fp8":
        return DeviceMatrix("fp8", matrix.codes(), matrix.scales(), None, 0, FP8_GROUP, dtype, *shape)
    codes = matrix.codes()
    halves = codes.view(matrix.num_rows, -1, 2, GROUP // 2)
    low = halves & 15
    return DeviceMatrix(
        form="int4",
        values=(low[:, :, 0] | (low[:, :, 1] << 4)).flatten(1),
        scales=matrix.small_scales() if format in K_QUANTS else matrix.scales(),
        minimums=matrix.minimums() if format in HAS_MINIMUMS and format not in K_QUANTS else None,
        zero=ZEROS.get(format, 0),
        group=GROUP,
        dtype=dtype,
        num_rows=matrix.num_rows,
        num_columns=matrix.num_columns,
        high=_high_plane(halves >> 4, HIGH_BITS[format]) if format in HIGH_BITS else None,
        factors=matrix.factors() if format in K_QUANTS else None,
    )


def _high_plane(halves: Tensor, bits: int) -> Tensor:
    """halves [N, G, 2, 16] uint8, below 2^bits → [N, G, bits] int32"""
    words = (halves.view(*halves.shape[:3], 4, 4) << _shifts(bits, halves.device)).sum(3, dtype=torch.uint8)
    if bits == 1:
        words = words.sum(2, keepdim=True, dtype=torch.uint8)
    return words.contiguous().view(torch.int32).flatten(2)


def _high_codes(high: Tensor) -> Tensor:
    """The inverse of `_high_plane`: [N, G, bits] int32 → [N, G, 32] uint8"""
    bits = high.shape[2]
    words = high.view(torch.uint8).view(*high.shape, 1, 4)
    codes: Tensor = (words >> _shifts(bits, high.device)) & (2**bits - 1)
    return codes.view(*high.shape[:2], GROUP)


def _shifts(bits: int, device: torch.device) -> Tensor:
    """Of each half's places, [2, 4, 1] uint8: four places with the same shift are in the bytes of a word."""
    shifts = torch.arange(4, dtype=torch.uint8, device=device) * bits
    return torch.stack([shifts, shifts + 4 if bits == 1 else shifts])[:, :, None]


def _floats(
    matrix: Matrix, dtype: torch.dtype, device: torch.device, quantization: Quantization | None, group: int
) -> DeviceMatrix:
    shape = matrix.num_rows, matrix.num_columns
    if quantization is None:
        values = matrix.data.to(device).to(dtype) if matrix.format in FLOATS else matrix.dequantize(dtype).to(device)
        return DeviceMatrix("float", values.contiguous(), None, None, 0, 0, dtype, *shape)
    group = group or group_of(matrix.num_columns)
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
