"""A chart: a title, a legend, and rows of panels, which share the width."""

import msgspec

from pipeline.cli.bench.plot import svg
from pipeline.cli.bench.plot.panels import Panel

WIDTH = 1040.0
PADDING = 20.0
LEGEND_STEP = 20.0


class Row(msgspec.Struct, frozen=True):
    """Panels side by side, under an optional title."""

    panels: tuple[Panel, ...]
    title: str = ""


class Chart(msgspec.Struct, frozen=True):
    title: str
    subtitle: str
    series: tuple[str, ...]
    """The names in the legend; lines and bars refer to them by index."""
    rows: tuple[Row, ...]
    note: str = ""
    """Explains the line styles; it is the last entry of the legend."""

    def as_svg(self) -> str:
        """The chart as a complete SVG file."""
        parts = [svg.text(PADDING, 34, self.title, "title"), svg.text(PADDING, 54, self.subtitle, "faint")]
        legend, y = self._legend(76)
        parts += legend
        for row in self.rows:
            if row.title:
                parts.append(svg.text(PADDING, y + 16, row.title, "head"))
                y += 22
            width = (WIDTH - 2 * PADDING) / len(row.panels)
            for i, panel in enumerate(row.panels):
                parts += panel.draw(PADDING + i * width, y, width)
            y += max(panel.height() for panel in row.panels) + 8
        return svg.document(WIDTH, y + 4, self.title, parts)

    def _legend(self, y: float) -> tuple[list[str], float]:
        """Elements, and the position below them. Entries that don't fit the line begin a new one."""
        parts = []
        x = PADDING
        for i, name in enumerate(self.series):
            width = 34 + svg.width_of(name) + 16
            x, y = _next_position(x, y, width)
            parts.append(svg.line(x, y, x + 26, y, f"{svg.colour_class(i)} line"))
            parts.append(svg.marker(x + 13, y, i, svg.colour_class(i)))
            parts.append(svg.text(x + 34, y + 4, name))
            x += width
        if self.note:
            x, y = _next_position(x, y, svg.width_of(self.note))
            parts.append(svg.text(x, y + 4, self.note, "faint"))
        return parts, y + LEGEND_STEP


def _next_position(x: float, y: float, width: float) -> tuple[float, float]:
    return (x, y) if x == PADDING or x + width <= WIDTH - PADDING else (PADDING, y + LEGEND_STEP)
