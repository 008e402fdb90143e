"""Options common to all benchmarks, and their output: tables, a verdict on each bound, JSON."""

import argparse
import secrets
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from pipeline.cli import option_types as types
from pipeline.cli.bench.report import console
from pipeline.cli.out_file import require_writable, write_output, writing
from pipeline.version import VERSION
from tools.benchmarks.pairs import Comparison, Reading, as_builtins


class Verdict(msgspec.Struct, frozen=True):
    """A bound, and the measured value."""

    words: str
    value: float
    relation: str
    """<=, <, >= or >: the relation between value and bound."""
    bound: float

    @property
    def is_met(self) -> bool:
        match self.relation:
            case "<=":
                return self.value <= self.bound
            case "<":
                return self.value < self.bound
            case ">=":
                return self.value >= self.bound
            case ">":
                return self.value > self.bound
        raise ValueError(f"no such relation: {self.relation}")

    def __str__(self) -> str:
        met = "met" if self.is_met else "MISSED"
        return f"{met}: {self.words}: {self.value:.4g}, which should be {self.relation} {self.bound:g}"


class BenchmarkReport:
    """Prints the results of a benchmark as they come, and collects them for the JSON and the exit code."""

    def __init__(self, subject: str, args: argparse.Namespace) -> None:
        """Raises ConfigError if the file of --json can't be written."""
        if args.json:
            require_writable(Path(args.json), "--json")
        self._args = args
        self._screen = console()
        self._progress = Console(stderr=True, highlight=False)
        self._data: dict[str, Any] = {"subject": subject, "version": VERSION, "seed": args.seed, "set": args.set}
        self.errors: Counter[str] = Counter()
        """Failed requests, by reason."""
        self.verdicts: list[Verdict] = []

    def tell(self, words: str) -> None:
        """Print the current activity on standard error."""
        self._progress.print(words, style="dim")

    def note(self, name: str, value: Any, words: str) -> None:
        """Print a fact, and add it to the JSON under its name."""
        self._data[name] = value
        self._screen.print(words, soft_wrap=True)

    def comparison(self, title: str, comparison: Comparison) -> None:
        self._data[title] = as_builtins(comparison)
        table = Table(title=title, title_justify="left")
        table.add_column("")
        for name in comparison.names:
            table.add_column(name, justify="right")
        table.add_column("ratio", justify="right")
        table.add_column("95 % or range", justify="right")
        for figure in comparison.figures():
            ratio = comparison.ratio(figure)
            table.add_row(
                figure,
                *(f"{comparison.median(arm, figure):,.4g}" for arm in (0, 1)),
                "" if ratio is None else f"{ratio.median:.3f}",
                "" if ratio is None else f"{ratio.low:.3f} – {ratio.high:.3f}",
            )
        self._screen.print(table)

    def figures(self, title: str, reading: Reading) -> None:
        """A table with one row per figure."""
        self._data[title] = reading
        table = Table(title=title, title_justify="left", show_header=False)
        for figure, value in reading.items():
            table.add_row(figure, f"{value:,.4g}")
        self._screen.print(table)

    def readings(self, title: str, rows: list[Reading]) -> None:
        """A table with one row per reading."""
        self._data[title] = rows
        table = Table(title=title, title_justify="left")
        for figure in rows[0]:
            table.add_column(figure, justify="right")
        for row in rows:
            table.add_row(*(f"{value:,.4g}" for value in row.values()))
        self._screen.print(table)

    def finish(self) -> int:
        """Print errors and verdicts, and write the JSON. Returns the exit code: 1 if --check was given and a bound was
        missed or a request failed, else 0."""
        for reason, count in self.errors.items():
            self._screen.print(f"failed: {count} × {reason}", soft_wrap=True, markup=False)
        for verdict in self.verdicts:
            self._screen.print(str(verdict), style="" if verdict.is_met else "red", soft_wrap=True, markup=False)
        self._data["errors"] = dict(self.errors)
        self._data["verdicts"] = [
            msgspec.to_builtins(verdict) | {"is_met": verdict.is_met} for verdict in self.verdicts
        ]
        if self._args.json:
            with writing(Path(self._args.json), "--json"):
                write_output(
                    Path(self._args.json), msgspec.json.format(msgspec.json.encode(self._data), indent=2) + b"\n"
                )
        is_good = not self.errors and all(verdict.is_met for verdict in self.verdicts)
        if self._args.check and not is_good:
            print("a bound was missed, or a request failed", file=sys.stderr)
        return 1 if self._args.check and not is_good else 0


def add_common(parser: argparse.ArgumentParser, rounds: int | None, seconds: float) -> None:
    """The options of every benchmark; `rounds` None leaves --rounds out."""
    if rounds is not None:
        parser.add_argument(
            "--rounds",
            type=types.positive,
            default=rounds,
            metavar="N",
            help="rounds of each arm; by default %(default)s",
        )
    parser.add_argument(
        "--seconds",
        type=types.duration,
        default=seconds,
        metavar="TIME",
        help="duration of a measurement without its warm-up; by default %(default)g",
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of every server")
    parser.add_argument("--seed", type=types.natural, default=None, help="seed of the prompts; by default random")
    parser.add_argument("--json", metavar="FILE", help="write all results to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bound is missed or a request fails")


def with_seed(args: argparse.Namespace) -> argparse.Namespace:
    """Draw a seed if none was given. A prefix cache may know the prompts of a seed that was used before."""
    if args.seed is None:
        args.seed = secrets.randbelow(2**32)
    return args
