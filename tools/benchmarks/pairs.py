"""Compares two arms in alternating rounds, A B B A …, so that drift affects both alike."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import msgspec

from pipeline.cli.bench.measure import percentile

Reading = dict[str, float]
"""The results of one measurement of one arm, by name."""

INTERVAL = 0.95


class Ratio(msgspec.Struct, frozen=True):
    """Each round's B / A, and the median of these ratios."""

    median: float
    low: float
    """`low` to `high` contains the median with 95 % confidence from 6 rounds on. With up to 8 rounds it is the whole
    range."""
    high: float

    @classmethod
    def of(cls, ratios: Sequence[float]) -> "Ratio":
        """Order statistics, as in the sign test: no distribution is assumed."""
        ordered = sorted(ratios)
        cut = num_outside(len(ordered))
        return cls(median(ordered), ordered[cut], ordered[-1 - cut])


def num_outside(count: int) -> int:
    """How many of `count` ordered values may be dropped at each end so that the rest contains the median with a
    probability of INTERVAL. Each value is below the median with a probability of one half. 0 if there are too few
    values."""
    chance, ways = 0.5**count, 1.0
    cut = 0
    while True:
        ways = ways * (count - cut) / (cut + 1)
        chance += ways * 0.5**count
        if 2 * chance > 1 - INTERVAL:
            return cut
        cut += 1


class Comparison(msgspec.Struct, frozen=True):
    """All readings of two arms. Readings of one round have the same index."""

    names: tuple[str, str]
    readings: tuple[list[Reading], list[Reading]]

    def median(self, arm: int, figure: str) -> float:
        return median(reading[figure] for reading in self.readings[arm])

    def ratio(self, figure: str) -> Ratio | None:
        """B / A; None if A is 0."""
        pairs = list(zip(*([reading[figure] for reading in arm] for arm in self.readings), strict=True))
        if any(a == 0 for a, _ in pairs):
            return None
        return Ratio.of([b / a for a, b in pairs])

    def figures(self) -> list[str]:
        return list(self.readings[0][0])


def order_of(round_number: int) -> tuple[int, int]:
    """The order of the arms in a round: A B, B A, A B, …"""
    return (0, 1) if round_number % 2 == 0 else (1, 0)


def compare(
    names: tuple[str, str], num_rounds: int, measure: Callable[[int, int], Reading], tell: Callable[[str], None]
) -> Comparison:
    """Measure each arm once per round. `measure` receives (arm, round), `tell` a description."""
    readings: tuple[list[Reading], list[Reading]] = ([], [])
    for number in range(num_rounds):
        for arm in order_of(number):
            tell(f"round {number + 1} of {num_rounds}: {names[arm]}")
            readings[arm].append(measure(arm, number))
    return Comparison(names, readings)


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Median and 99th percentile; zeros without values."""
    ordered = sorted(values)
    return (percentile(ordered, 0.5), percentile(ordered, 0.99)) if ordered else (0.0, 0.0)


def as_builtins(comparison: Comparison) -> Any:
    """For JSON, with medians and ratios."""
    return {
        "arms": dict(zip(comparison.names, comparison.readings, strict=True)),
        "ratios": {figure: msgspec.to_builtins(comparison.ratio(figure)) for figure in comparison.figures()},
    }
