"""Tables for narrow terminals: columns that do not fit beside each other go into a further table below, with the same
first columns."""

from collections.abc import Sequence
from typing import NamedTuple

from rich.box import HEAVY_HEAD, Box
from rich.console import Console
from rich.table import Table

_MEASURE_WIDTH = 10_000


class Row(NamedTuple):
    """A row, or a title in the first cell that begins a section."""

    cells: Sequence[str]
    is_title: bool


class StackedTable:
    """Collects rows, then builds as few tables as fit a width."""

    def __init__(self, headings: Sequence[str], *, num_keys: int = 1, left: Sequence[str] = (), box: Box = HEAVY_HEAD):
        """The first `num_keys` columns are in every table. They and the columns in `left` are left-aligned."""
        self._headings = headings
        self._num_keys = num_keys
        self._left = (*headings[:num_keys], *left)
        self._box = box
        self._rows: list[Row] = []

    def add_title(self, title: str) -> None:
        """Begin a section with a title."""
        self._rows.append(Row((title,), is_title=True))

    def add_row(self, *cells: str) -> None:
        """Add a row with a cell for each heading."""
        assert len(cells) == len(self._headings), "a row has a cell for each heading"
        self._rows.append(Row(cells, is_title=False))

    def tables(self, width: int | None) -> list[Table]:
        """Tables of at most this width; one table of any width for None. A first column that leaves no room for a
        second one is folded."""
        columns = range(self._num_keys, len(self._headings))
        if width is None:
            return [self._table(columns)]
        screen = Console(width=_MEASURE_WIDTH)
        tables: list[Table] = []
        shown: list[int] = []
        for column in columns:
            table = self._table([*shown, column])
            if shown and screen.measure(table).maximum > width:
                shown = []
                table = self._table([column])
            else:
                tables[-1:] = []
            shown.append(column)
            tables.append(table)
        return tables

    def _table(self, columns: Sequence[int]) -> Table:
        shown = [*range(self._num_keys), *columns]
        table = Table(box=self._box)
        for column in shown:
            heading, is_key = self._headings[column], column < self._num_keys
            justify = "left" if heading in self._left else "right"
            table.add_column(heading, justify=justify, no_wrap=not is_key, overflow="fold")  # type: ignore[arg-type]
        for row in self._rows:
            if row.is_title:
                table.add_section()
                table.add_row(*row.cells, style="bold")
            else:
                table.add_row(*(row.cells[column] for column in shown))
        return table
