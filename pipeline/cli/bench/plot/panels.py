"""The panels of a chart: lines over a count, and bars."""

from collections.abc import Sequence

import msgspec

from pipeline.cli.bench.plot import scales, svg
from pipeline.cli.bench.plot.scales import Scale

LEFT, RIGHT, TOP, BOTTOM = 56.0, 18.0, 30.0, 46.0
"""Margins around the axes of a line panel."""
LINE_HEIGHT = 250.0
BAR_STEP, BAR_THICKNESS = 24.0, 14.0
VALUE_SPACE = 62.0
"""Room for the number behind a bar."""


class Line(msgspec.Struct, frozen=True):
    """One line of a panel."""

    series: int
    """Index of the series; selects colour and marker."""
    name: str
    """What tooltips call it."""
    points: tuple[tuple[int, float], ...]
    """(count, value), by count. Values must be positive if the panel is logarithmic."""
    is_dashed: bool = False


class LinePanel(msgspec.Struct, frozen=True):
    """Lines over a count, on a logarithmic axis. The values' axis begins at 0 unless `is_log` is set."""

    title: str
    x_title: str
    unit: str
    """Of the values."""
    lines: tuple[Line, ...]
    is_log: bool = False

    def height(self) -> float:
        return LINE_HEIGHT

    def draw(self, x: float, y: float, width: float) -> list[str]:
        """The panel's elements, with its top left corner at (x, y)."""
        left, right = x + LEFT, x + width - RIGHT
        top, bottom = y + TOP, y + LINE_HEIGHT - BOTTOM
        values = [value for one in self.lines for _, value in one.points]
        y_scale = scales.logarithmic(values) if self.is_log else scales.from_zero(values)
        x_scale = scales.of_counts([count for one in self.lines for count, _ in one.points])

        def position(count: float, value: float) -> tuple[float, float]:
            inset = 10.0  # keeps the first and the last marker off the frame
            return (
                left + inset + x_scale.position(count) * (right - left - 2 * inset),
                bottom - y_scale.position(value) * (bottom - top),
            )

        parts = [svg.text(x + width / 2, y + 16, self.title, "head", "middle")]
        for tick in y_scale.ticks:
            at = position(x_scale.ticks[0], tick)[1]
            parts.append(svg.line(left, at, right, at, "grid"))
            parts.append(svg.text(left - 7, at + 4, scales.as_label(tick), "faint", "end"))
        parts.append(svg.line(left, bottom, right, bottom, "axis"))
        for tick in _spaced(x_scale, [position(tick, y_scale.ticks[0])[0] for tick in x_scale.ticks]):
            at = position(tick, y_scale.ticks[0])[0]
            parts.append(svg.line(at, bottom, at, bottom + 4, "axis"))
            parts.append(svg.text(at, bottom + 18, scales.as_label(tick), "faint", "middle"))
        parts.append(svg.text((left + right) / 2, bottom + 36, self.x_title, "faint", "middle"))
        unit = f"{self.unit} (logarithmic)" if self.is_log else self.unit
        parts.append(svg.text(x + 12, (top + bottom) / 2, unit, "faint", "middle", turned=True))
        for one in self.lines:
            colour = svg.colour_class(one.series)
            points = [position(count, value) for count, value in one.points]
            parts.append(svg.polyline(points, f"{colour} line dashed" if one.is_dashed else f"{colour} line"))
            for (count, value), (at_x, at_y) in zip(one.points, points, strict=True):
                words = f"{one.name}, {self.x_title} {count}: {as_value(value)} {self.unit}"
                parts.append(svg.marker(at_x, at_y, one.series, f"{colour} hollow" if one.is_dashed else colour, words))
        return parts


class Bar(msgspec.Struct, frozen=True):
    series: int
    name: str
    value: float


class BarPanel(msgspec.Struct, frozen=True):
    """Horizontal bars from 0, each with its name and its value."""

    title: str
    unit: str
    bars: tuple[Bar, ...]

    def height(self) -> float:
        return TOP + BAR_STEP * len(self.bars) + 12

    def draw(self, x: float, y: float, width: float) -> list[str]:
        """The panel's elements, with its top left corner at (x, y)."""
        left = x + 16 + max(svg.width_of(one.name) for one in self.bars)
        scale = max(max(one.value for one in self.bars), 1e-9)
        room = x + width - RIGHT - VALUE_SPACE - left
        parts = [svg.text(x + width / 2, y + 16, f"{self.title} ({self.unit})", "head", "middle")]
        for i, one in enumerate(self.bars):
            top = y + TOP + BAR_STEP * i
            length = room * one.value / scale
            parts.append(svg.text(left - 8, top + 11, one.name, "", "end"))
            words = f"{one.name}: {as_value(one.value)} {self.unit}"
            parts.append(svg.bar(left, top, length, BAR_THICKNESS, svg.colour_class(one.series), words))
            parts.append(svg.text(left + length + 6, top + 11, as_value(one.value), "faint"))
        return parts


Panel = LinePanel | BarPanel


def as_value(value: float) -> str:
    """A measured value: one decimal below 100."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _spaced(scale: Scale, positions: Sequence[float]) -> list[float]:
    """The ticks whose labels don't overlap the label to their right. The last tick is always among them."""
    kept: list[float] = []
    free = float("inf")
    for tick, at in sorted(zip(scale.ticks, positions, strict=True), reverse=True):
        half = svg.width_of(scales.as_label(tick)) / 2
        if at + half + 4 <= free:
            kept.append(tick)
            free = at - half
    return kept[::-1]
