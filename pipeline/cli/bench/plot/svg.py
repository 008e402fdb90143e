"""SVG elements as text, and the colours of the light and the dark theme."""

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

LIGHT = ("#0969b8", "#d1480f", "#0b8a5f", "#8a4fc4", "#b58100", "#c2306f", "#5c6670")
DARK = ("#58a6ff", "#ff8a50", "#3fc890", "#bf94f5", "#e3b341", "#f778ba", "#a5b0bb")
"""The colours of the series, distinguishable with the common kinds of colour blindness. Marker shapes differ too."""

CHAR_WIDTH = 0.6
"""Width of an average character of the font, in font sizes."""
MARKER_RADIUS = 4.0


def style() -> str:
    """The style sheet. The theme follows the reader's; the background is part of the picture, so that the text is
    readable on any page."""
    return (
        "<style>\n"
        "text{font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;font-size:12px}\n"
        f"{_theme('#ffffff', '#1f2328', '#59636e', '#d8dee4', LIGHT)}"
        "@media (prefers-color-scheme:dark){\n"
        f"{_theme('#0d1117', '#f0f6fc', '#9aa4af', '#30363d', DARK)}"
        "}\n"
        ".title{font-size:17px;font-weight:600}\n.head{font-size:13px;font-weight:600}\n"
        ".line{fill:none;stroke-width:2}\n.dashed{stroke-width:1.5;stroke-dasharray:5 4}\n"
        ".hollow{fill-opacity:0;stroke-width:1.5}\n"
        "</style>\n"
    )


def _theme(background: str, ink: str, faint: str, grid: str, colours: Sequence[str]) -> str:
    series = "".join(f".s{i}{{fill:{colour};stroke:{colour}}}\n" for i, colour in enumerate(colours))
    return (
        f".background{{fill:{background}}}\ntext{{fill:{ink}}}\n.faint{{fill:{faint}}}\n"
        f".grid{{stroke:{grid}}}\n.axis{{stroke:{faint}}}\n{series}"
    )


def colour_class(index: int) -> str:
    """The class of a series; with more series than colours they repeat."""
    return f"s{index % len(LIGHT)}"


def document(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    """A complete SVG file."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" role="img" aria-label={quoteattr(title)}>\n'
        f"<title>{escape(title)}</title>\n{style()}"
        f'<rect class="background" width="{width:g}" height="{height:g}"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def text(x: float, y: float, words: str, classes: str = "", anchor: str = "start", turned: bool = False) -> str:
    """A line of text. `turned` turns it by 90 degrees against the clock around its position."""
    rotation = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    kind = f' class="{classes}"' if classes else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}{rotation}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, classes: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{classes}"/>'


def polyline(points: Sequence[tuple[float, float]], classes: str) -> str:
    return f'<polyline points="{_joined(points)}" class="{classes}"/>'


def bar(x: float, y: float, width: float, height: float, classes: str, words: str) -> str:
    """A rectangle with a tooltip."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}" class="{classes}">'
        f"<title>{escape(words)}</title></rect>"
    )


def marker(x: float, y: float, index: int, classes: str, words: str = "") -> str:
    """The marker of a series: its shape depends on the index. `words` is the tooltip."""
    tooltip = f"<title>{escape(words)}</title>" if words else ""
    corners = (0, 4, 3, 4, 3)[index % 5]
    if corners == 0:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{MARKER_RADIUS:g}" class="{classes}">{tooltip}</circle>'
    # Squares stand on a side, diamonds on a corner; the second kind of triangle points down.
    first = {1: math.pi / 4, 2: math.pi / 2, 3: 0.0, 4: -math.pi / 2}[index % 5]
    radius = MARKER_RADIUS * 1.25
    angles = [first + 2 * math.pi * i / corners for i in range(corners)]
    points = [(x + radius * math.cos(angle), y - radius * math.sin(angle)) for angle in angles]
    return f'<polygon points="{_joined(points)}" class="{classes}">{tooltip}</polygon>'


def width_of(words: str, font_px: float = 12.0) -> float:
    """The estimated width of a text, in pixels."""
    return CHAR_WIDTH * font_px * len(words)


def _joined(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
