"""What commands write to a terminal about servers and models, whose words may hold escape codes."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from pipeline.runtime.log.printable import printable


class SafeConsole(Console):
    """A rich console that shows control characters in texts as escapes, and texts such as `[red]` as they are; styles
    and rich's own codes work as always."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, markup=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text = segment.text
            if segment.control or text.isprintable():
                yield segment
            else:
                yield Segment(printable(text, keep="\n", most=len(text)), segment.style)
