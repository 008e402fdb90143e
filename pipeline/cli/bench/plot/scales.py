"""Maps values to positions along an axis, and chooses the axis's ticks."""

import math
from collections.abc import Sequence

import msgspec

NUM_STEPS = 4
"""About this many steps between the ticks of a linear axis."""
MAX_TICKS = 8
"""A logarithmic axis with more ticks than this keeps the powers of ten only."""


class Scale(msgspec.Struct, frozen=True):
    """An axis from its first tick to its last."""

    ticks: tuple[float, ...]
    is_log: bool

    def position(self, value: float) -> float:
        """0 at the first tick, 1 at the last; 0.5 if they are equal."""
        low, high = self._of(self.ticks[0]), self._of(self.ticks[-1])
        return (self._of(value) - low) / (high - low) if high > low else 0.5

    def _of(self, value: float) -> float:
        return math.log(value) if self.is_log else value


def from_zero(values: Sequence[float]) -> Scale:
    """A linear axis from 0 to a round number, at least the largest of the values."""
    most = max(values, default=0.0) or 1.0
    step = _round_up(most / NUM_STEPS, (1, 2, 2.5, 5, 10))
    return Scale(tuple(step * i for i in range(math.ceil(most / step - 1e-9) + 1)), is_log=False)


def logarithmic(values: Sequence[float]) -> Scale:
    """A logarithmic axis around the values, which must be positive, with ticks at 1, 2 and 5 times powers of ten."""
    least, most = min(values), max(values)
    powers = range(math.floor(math.log10(least)) - 1, math.ceil(math.log10(most)) + 2)
    for factors in ((1, 2, 5), (1,)):
        ticks = [factor * 10.0**power for power in powers for factor in factors]
        first = max(i for i, tick in enumerate(ticks) if tick <= least)
        last = max(min(i for i, tick in enumerate(ticks) if tick >= most), first + 1)
        if last - first < MAX_TICKS:
            break
    return Scale(tuple(ticks[first : last + 1]), is_log=True)


def of_counts(counts: Sequence[int]) -> Scale:
    """A logarithmic axis with a tick at each of the given counts."""
    return Scale(tuple(map(float, sorted(set(counts)))), is_log=True)


def as_label(value: float) -> str:
    """A tick's number with as few digits as it needs: 1,000 or 0.25."""
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


def _round_up(value: float, factors: Sequence[float]) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in factors if factor * power >= value * (1 - 1e-9))
