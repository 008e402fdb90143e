"""Tables whose columns are stacked in narrow terminals."""

import io

import pytest
from rich.console import Console
from rich.table import Table

from pipeline.cli.check.command import table_of
from pipeline.cli.check.judge import CheckResult
from pipeline.cli.profile.report import as_tables
from pipeline.cli.profile.results import ProfilePlan
from pipeline.cli.stacked import StackedTable
from pipeline.config.load import load
from tests.cli.profile.test_profile_command import measured


def lines_of(tables: list[Table | str] | list[Table], width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    for table in tables:
        console.print(table, markup=False)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return [line.rstrip() for line in text.splitlines()]


def cells(lines: list[str]) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")] for line in lines if line[0] in "│┃"
    ]


def a_table() -> StackedTable:
    table = StackedTable(("name", "first", "second", "third"))
    table.add_title("a section")
    table.add_row("x", "1" * 10, "2" * 10, "3" * 10)
    return table


def test_columns_that_fit_stay_in_one_table() -> None:
    assert len(a_table().tables(None)) == len(a_table().tables(60)) == 1


def test_columns_that_do_not_fit_go_into_further_tables_with_the_first_column() -> None:
    tables = a_table().tables(45)
    assert cells(lines_of(tables, 45)) == [
        ["name", "first", "second"],
        ["a section", "", ""],
        ["x", "1" * 10, "2" * 10],
        ["name", "third"],
        ["a section", ""],
        ["x", "3" * 10],
    ]


def test_a_first_column_that_is_too_long_is_folded() -> None:
    table = StackedTable(("name", "value"))
    table.add_row("n" * 50, "1" * 10)
    lines = lines_of(table.tables(40), 40)
    assert max(map(len, lines)) <= 40
    assert "".join(row[0] for row in cells(lines)[1:]) == "n" * 50


@pytest.mark.parametrize("width", [60, 80])
def test_a_profile_fits_a_narrow_terminal(width: int) -> None:
    profile = measured(load(None), ProfilePlan((8,), 256, (512,), 1, "torch"))
    parts = as_tables(profile, width)
    lines = lines_of(parts, width)
    assert max(map(len, lines)) <= width
    shown = {cell for row in cells(lines) for cell in row}
    assert {"4.000", "128,000.0", "75.0", "3.000", "75 %", "1.000", "25 %", "14.00", "3.50", "120.0 int8"} <= shown
    assert not any("…" in line for line in lines)


def test_the_checks_of_a_model_fit_80_columns() -> None:
    way = "behind a cached prefix"
    finding = CheckResult("avx512_bf16, bfloat16", way, 4096, 0.0123, 0.0456, 0.0789, 0.0991, True, 10, 9, 1)
    tables = table_of([finding]).tables(80)
    lines = lines_of(tables, 80)
    assert max(map(len, lines)) <= 80
    shown = [cell for row in cells(lines) for cell in row]
    for words in ("4096 ids", "1.23%", "4.56%", "7.89%", "9.91%", "9 of 10, 1 undecided", "pass"):
        assert words in shown, f"{words!r} is broken or missing"
    assert shown.count("avx512_bf16, bfloat16") == len(tables)
