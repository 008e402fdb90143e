"""A quantized weight of a checkpoint, which is converted a few rows at a time.

`IntegerMatrix` covers all schemes whose weights are integers with scales; their subclasses only read the integers.

Shapes: N rows, K columns, n of the rows at a time, G groups of columns with a scale each.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeline.stages.prepare.quantized.packing import Array, Rows, to_blocks
from pipeline.stages.prepare.weights.tensors import Shape
from pipeline.stages.prepare.weights.weight_file import GROUP, Format

EXACT = "exact"
ACT_ORDER = "act-order: its groups of columns are not contiguous"
HALVES_ROUNDED = "scales or minimums rounded to float16"
SMALLEST_NORMAL = 2.0**-14
"""Of float16. Smaller numbers have fewer bits."""
ALL = slice(None)


@dataclass(frozen=True, slots=True)
class ChosenFormat:
    """The format that keeps a matrix as well as possible."""

    format: Format
    note: str
    """What is lost, or why the format isn't smaller; for the log."""


class QuantizedMatrix(ABC):
    """A weight [N, K]."""

    shape: Shape

    @abstractmethod
    def kept(self) -> ChosenFormat:
        """The format to store the matrix in, if the user wants none in particular."""

    @abstractmethod
    def values(self, rows: Rows) -> Array:
        """The values of some rows, [n, K] float32."""

    def note(self, format: Format) -> str | None:
        """What is lost if `blocks` stores the matrix in a format; None if it can't, and `values` must be rounded."""
        return None

    def blocks(self, rows: Rows, format: Format) -> Array:
        """Some rows in a format for which `note` is not None, [n, bytes per row] uint8."""
        raise NotImplementedError

    def sort_columns(self) -> Array | None:
        """Order the columns so that groups are contiguous, if that is what `kept` lacks.

        Returns the index in the checkpoint of each column, [K]; None if nothing changes.
        """
        return None


class FloatMatrix(QuantizedMatrix):
    """A weight whose values fit no smaller format than bfloat16."""

    kind: str
    """What the checkpoint has, for the log."""

    def kept(self) -> ChosenFormat:
        return ChosenFormat("bf16", f"{self.kind}, rounded once")


@dataclass(frozen=True, slots=True)
class _Halves:
    """What float16 does to some numbers."""

    exact: bool
    fitting: bool
    """No number loses more than the precision of float16."""

    @classmethod
    def of(cls, numbers: Array) -> "_Halves":
        with np.errstate(over="ignore"):
            halves = numbers.astype(np.float16)
        exact = halves == numbers
        fitting = exact | (np.isfinite(halves) & (np.abs(halves) >= SMALLEST_NORMAL))
        return cls(bool(exact.all()), bool(fitting.all()))


@dataclass(frozen=True, slots=True)
class _Grid:
    """What all scales and zero points of a matrix have in common."""

    scales: _Halves
    minimums: _Halves
    symmetric: bool
    """Every zero point is the middle of the codes."""


class IntegerMatrix(QuantizedMatrix):
    """A weight scale * (code - zero) with unsigned codes, and a scale and zero point for each group of columns."""

    def __init__(self, shape: Shape, bits: int, group_size: int, group_of: Array | None = None) -> None:
        """`group_of` [K] int64 is the group of each column; by default column // group_size."""
        self.shape, self.bits, self._group_size = shape, bits, group_size
        is_ordered = group_of is None or np.array_equal(group_of, np.arange(shape[1]) // group_size)
        self._group_of = None if is_ordered else group_of
        self._order: Array | None = None

    @abstractmethod
    def codes(self, rows: Rows) -> Array:
        """[n, K] uint8 below 2 ** bits, with the columns in the checkpoint's order."""

    @abstractmethod
    def scales(self, rows: Rows) -> Array:
        """[n, G] float32"""

    @abstractmethod
    def zeros(self, rows: Rows) -> Array:
        """[n, G] int32"""

    @cached_property
    def _grid(self) -> _Grid:
        scales, zeros = self.scales(ALL), self.zeros(ALL)
        symmetric = bool((zeros == 1 << (self.bits - 1)).all())
        return _Grid(_Halves.of(scales), _Halves.of(zeros * scales), symmetric)

    def kept(self) -> ChosenFormat:
        wanted: Format = "q8_0"
        if self.bits <= 4:
            wanted = "q4_0" if self._grid.symmetric else "q4_1"
        if (note := self.note(wanted)) is not None:
            return ChosenFormat(wanted, note)
        return ChosenFormat("bf16", self._obstacle() or f"{self.bits} bits with zero points that q8_0 lacks")

    def _obstacle(self) -> str | None:
        """Why no blocks can hold the codes."""
        if self._group_of is not None and self._order is None:
            return ACT_ORDER
        if self.shape[1] % GROUP:
            return f"{self.shape[1]} columns, not a multiple of {GROUP}"
        if self._group_size % GROUP and self._group_size < self.shape[1]:
            return f"groups of {self._group_size} columns, not a multiple of {GROUP}"
        if not self._grid.scales.fitting:
            return "scales outside float16's range"
        return None

    def note(self, format: Format) -> str | None:
        if self._obstacle() is not None:
            return None
        grid = self._grid
        match format:
            case "q4_0" if self.bits <= 4 and grid.symmetric:
                exact = grid.scales.exact
            case "q4_1" if self.bits <= 4 and grid.minimums.fitting:
                exact = grid.scales.exact and grid.minimums.exact
            case "q8_0" if self.bits <= 4 or grid.symmetric:
                exact = grid.scales.exact
            case _:
                return None
        return EXACT if exact else HALVES_ROUNDED

    def values(self, rows: Rows) -> Array:
        scales, zeros = self.scales(rows), self.zeros(rows)
        codes = self._ordered_codes(rows).astype(np.float32)
        group_of = self._columns()
        codes -= zeros.astype(np.float32)[:, group_of]
        codes *= scales[:, group_of]
        return codes

    def blocks(self, rows: Rows, format: Format) -> Array:
        group_of = self._columns()[::GROUP]
        codes = self._ordered_codes(rows)
        return to_blocks(format, codes, self.zeros(rows)[:, group_of], self.scales(rows)[:, group_of])

    def sort_columns(self) -> Array | None:
        if self._group_of is None:
            return None
        order = np.argsort(self._group_of, kind="stable")
        if not np.array_equal(self._group_of[order], np.arange(self.shape[1]) // self._group_size):
            return None  # groups of different sizes
        self._order = order
        return order

    def _ordered_codes(self, rows: Rows) -> Array:
        codes = self.codes(rows)
        return codes if self._order is None else codes[:, self._order]

    def _columns(self) -> Array:
        """The group of each column, [K]."""
        if self._group_of is None or self._order is not None:
            return np.arange(self.shape[1]) // self._group_size
        return self._group_of
