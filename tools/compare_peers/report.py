"""Figures and ratios as tables, the chart, and the JSON."""

from collections.abc import Sequence
from statistics import median
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table

from pipeline.cli.bench.measure import Distribution, Summary
from pipeline.cli.bench.plot.chart import Chart, Row
from pipeline.cli.bench.plot.panels import Bar, BarPanel, as_value
from pipeline.cli.bench.plot.results import STYLES, rows_of
from tools.compare_peers.loads import DECODE, Load
from tools.compare_peers.machine import Commit, Machine
from tools.compare_peers.measure import Failure, Plan, Run
from tools.compare_peers.peers import Peer

LATENCIES = (("ttft_ms", "TTFT"), ("itl_ms", "ITL"))
STREAM_LATENCIES = (("ttft_ms", "TTFT"), ("stream_itl_ms", "stream ITL"))


class Provenance(msgspec.Struct, frozen=True):
    """Where and with what the figures were measured."""

    machine: Machine
    commit: Commit
    begun: str
    """UTC, ISO 8601."""
    model: str
    gguf: str
    """The name of the model's file."""
    versions: dict[str, str]
    """Of the other servers, as they report them."""
    command: list[str]


class Stored(msgspec.Struct, frozen=True):
    """The part of results.json that a later run needs. `as_json` writes the rest from it."""

    provenance: Provenance
    plan: Plan
    runs: list[Run]


class FigureRow(msgspec.Struct, frozen=True):
    """One figure of all servers."""

    load: str
    figure: str
    unit: str
    concurrency: int
    temperature: float
    values: dict[str, float | None]
    """By server; None if it was not measured."""
    ratios: dict[str, float | None]
    """Of the servers that have a rival: their value / the rival's."""

    @property
    def label(self) -> str:
        return f"{self.figure}, {self.concurrency}, {self.temperature:g}"


class Results:
    """The medians of all rounds."""

    def __init__(self, plan: Plan, provenance: Provenance, runs: Sequence[Run], failures: Sequence[Failure]) -> None:
        self._plan = plan
        self._provenance = provenance
        self._runs = runs
        self._failures = failures
        measured = {run.server for run in runs}
        self._peers = [peer for peer in plan.peers if peer.name in measured]
        self._levels = {
            (peer.name, load.name): self._medians(peer, load) for peer in self._peers for load in plan.loads
        }
        self.rows = [row for load in plan.loads for row in self._rows(load)]

    def _medians(self, peer: Peer, load: Load) -> list[Summary]:
        """Each level of a load, with the median of each number over the rounds."""
        reports = [run.reports[load.name] for run in self._runs if run.server == peer.name]
        return [median_of(levels) for levels in zip(*(report.levels for report in reports), strict=True)]

    def _rows(self, load: Load) -> list[FigureRow]:
        rows = []
        for concurrency in load.concurrencies:
            for temperature in self._plan.temperatures:
                at = {
                    peer.name: next(
                        level
                        for level in self._levels[peer.name, load.name]
                        if (level.concurrency, level.temperature) == (concurrency, temperature)
                    )
                    for peer in self._peers
                }
                values = {name: float(getattr(level, load.figure)) for name, level in at.items()}
                of = "" if load.arrival is None else f"prompts of {load.arrival.prompt_tokens}: "
                rows.append(self._row(load, of + load.unit, load.unit, concurrency, temperature, values))
                if load.name != DECODE and load.arrival is None:
                    continue
                for field, title in LATENCIES if load.arrival is None else STREAM_LATENCIES:
                    for percentile in ("p50", "p99"):
                        values = {name: float(getattr(getattr(level, field), percentile)) for name, level in at.items()}
                        figure = f"{of}{title} {percentile}"
                        rows.append(self._row(load, figure, "ms", concurrency, temperature, values))
        return rows

    def _row(
        self, load: Load, figure: str, unit: str, concurrency: int, temperature: float, values: dict[str, float]
    ) -> FigureRow:
        present: dict[str, float | None] = {name: value or None for name, value in values.items()}
        ratios: dict[str, float | None] = {}
        for peer in self._peers:
            if peer.rival is not None and peer.rival in values:
                own, theirs = present[peer.name], present[peer.rival]
                ratios[peer.name] = own / theirs if own and theirs else None
        return FigureRow(load.name, figure, unit, concurrency, temperature, present, ratios)

    # ------------------------------------------------------------------------------------------------------ output

    def as_json(self) -> bytes:
        """Everything: machine, commit, versions, commands, figures and ratios, and the reports of all runs."""
        stored = Stored(self._provenance, self._plan, list(self._runs))
        data = msgspec.to_builtins(stored) | {"figures": self.rows, "failures": list(self._failures)}
        return msgspec.json.format(msgspec.json.encode(data), indent=2) + b"\n"

    def as_tables(self) -> RenderableType:
        """A table of figures and one of ratios."""
        parts: list[RenderableType] = []
        for title, header, body in self._grids():
            table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
            for i, name in enumerate(header):
                table.add_column(name, justify="right" if i else "left", no_wrap=i == 0)
            for cells in body:
                table.add_row(*cells)
            parts.append(table)
        return Group(*parts)

    def as_markdown(self) -> str:
        """The same tables, below what identifies the measurement."""
        lines = [self._subtitle(), ""]
        for title, header, body in self._grids():
            lines += [f"{title}:", "", f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
            lines += [f"| {' | '.join(cells)} |" for cells in body] + [""]
        return "\n".join(lines)

    def _grids(self) -> list[tuple[str, list[str], list[list[str]]]]:
        """Title, header and rows of each table."""
        first = "streams, temperature"
        labels = {peer.name: peer.label for peer in self._plan.peers}
        body = [[row.label, *(_cell(row.values[peer.name]) for peer in self._peers)] for row in self.rows]
        grids = [("Figures (TTFT and ITL in ms)", [first, *(peer.label for peer in self._peers)], body)]
        if compared := [peer for peer in self._peers if peer.rival in {one.name for one in self._peers}]:
            header = [first, *(f"{peer.label} / {labels[peer.rival or '']}" for peer in compared)]
            ratios = [[row.label, *(_ratio(row.ratios[peer.name]) for peer in compared)] for row in self.rows]
            grids.append(("Ratios (TTFT and ITL: below 1 is faster)", header, ratios))
        return grids

    def chart(self) -> Chart:
        """Decode over concurrency for each temperature, then the other loads as bars, at the first temperature."""
        names = tuple(peer.label for peer in self._peers)
        rows: list[Row] = []
        if any(load.name == DECODE for load in self._plan.loads):
            decode = [(peer.label, self._levels[peer.name, DECODE]) for peer in self._peers]
            rows += rows_of(decode, self._plan.temperatures)
        first = self._plan.temperatures[0]
        panels = []
        for load in self._plan.loads:
            if load.name != DECODE and load.arrival is None:
                bars = tuple(
                    Bar(i, peer.label, float(getattr(level, load.figure)))
                    for i, peer in enumerate(self._peers)
                    for level in self._levels[peer.name, load.name]
                    if level.temperature == first
                )
                panels.append(BarPanel(load.title, load.unit, bars))
        if panels:
            rows.append(Row(tuple(panels), f"temperature {first:g}"))
        others = [peer.label.split()[0] for peer in self._peers if peer.rival is None]
        title = " and ".join(["Pipeline", *others]) if len(others) < 2 else f"Pipeline, {' and '.join(others)}"
        model = self._provenance.gguf.removesuffix(".gguf")
        return Chart(f"{model}: {title}", self._subtitle(), names, tuple(rows), STYLES)

    def _subtitle(self) -> str:
        plan, provenance = self._plan, self._provenance
        rounds = f", medians of {plan.rounds} rounds" if plan.rounds > 1 else ""
        return (
            f"{provenance.machine}; {provenance.commit}, {provenance.begun[:10]}; "
            f"{plan.duration_s:g} s per measurement{rounds}"
        )


def median_of(levels: Sequence[Summary]) -> Summary:
    """One level over several rounds: the median of each number, and all errors."""
    first = levels[0]
    if len(levels) == 1:
        return first
    changes: dict[str, Any] = {"errors": {}, "num_errors": sum(level.num_errors for level in levels)}
    for level in levels:
        for reason, count in level.errors.items():
            changes["errors"][reason] = changes["errors"].get(reason, 0) + count
    for field in first.__struct_fields__:
        values = [getattr(level, field) for level in levels]
        if isinstance(values[0], Distribution):
            names = Distribution.__struct_fields__
            changes[field] = Distribution(*(median(getattr(value, name) for value in values) for name in names))
        elif isinstance(values[0], float):
            changes[field] = median(values)
    return msgspec.structs.replace(first, **changes)


def _cell(value: float | None) -> str:
    return "–" if value is None else as_value(value)


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
