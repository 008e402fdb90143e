"""The results as tables for a terminal and as JSON."""

from collections.abc import Sequence
from itertools import groupby

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.cli.bench.measure import Distribution, Summary
from pipeline.cli.bench.options import Workload
from pipeline.cli.safe_console import SafeConsole

TABLE_WIDTH = 80
PIPE_WIDTH = 130
"""Width of output to a file or a pipe."""


class BenchReport(msgspec.Struct, frozen=True):
    """One run of `pipeline bench`."""

    url: str
    model: str
    version: str
    """Version of this program."""
    workload: Workload
    levels: list[Summary]
    """By concurrency, then by temperature."""
    is_complete: bool = True
    """False if the run was interrupted, or the server died: some levels are missing."""


def as_text(report: BenchReport, width: int = TABLE_WIDTH) -> RenderableType:
    """Tables with a column for each concurrency and temperature, at most `width` wide, and no wider than
    `TABLE_WIDTH`."""
    tables = (part for table in _tables(report.levels, min(width, TABLE_WIDTH)) for part in (table, ""))
    return Group(_title(report), *tables, _notes(report))


def console(pipe_width: int = PIPE_WIDTH) -> Console:
    """Standard output, with a width of `pipe_width` if it is not a terminal."""
    found = SafeConsole(highlight=False)
    return found if found.is_terminal else SafeConsole(highlight=False, width=pipe_width)


def _tables(levels: Sequence[Summary], width: int) -> list[Table]:
    """As few tables as fit the width. The temperatures of one concurrency stay together."""
    tables: list[Table] = []
    shown: list[Summary] = []
    screen = Console(width=10 * TABLE_WIDTH)
    for _, group in groupby(levels, key=lambda level: level.concurrency):
        added = list(group)
        table = _table([*shown, *added])
        if shown and screen.measure(table).maximum > width:
            shown, table = added, _table(added)
        else:
            shown += added
            tables[-1:] = []
        tables.append(table)
    return tables


def _table(levels: Sequence[Summary]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 0, 0, 1), pad_edge=False)
    table.add_column("streams\ntemperature", no_wrap=True)
    for level in levels:
        table.add_column(f"{level.concurrency}\n{level.temperature:g}", justify="right", no_wrap=True)
    table.add_row("requests", *(f"{level.num_requests:,}" for level in levels))
    table.add_row("errors", *(Text(f"{level.num_errors}", "red" if level.num_errors else "") for level in levels))
    table.add_row("tokens in/out", *(f"{level.prompt_tokens:.0f}/{level.completion_tokens:.0f}" for level in levels))
    table.add_row("output tok/s", *(_number(level.output_tokens_per_s) for level in levels))
    table.add_row("total tok/s", *(f"{level.total_tokens_per_s:,.0f}" for level in levels))
    table.add_row("prefill tok/s", *(f"{level.prefill_tokens_per_s:,.0f}" for level in levels))
    for name in ("ttft", "itl", "tpot"):
        spreads: list[Distribution] = [getattr(level, f"{name}_ms") for level in levels]
        table.add_row(f"{name.upper()} p50", *(_time(spread.p50) for spread in spreads))
        table.add_row(f"{name.upper()} p99", *(_time(spread.p99) for spread in spreads))
    beside = [level.stream_itl_ms for level in levels]
    if any(spread.count for spread in beside):
        table.add_row("stream ITL p50", *(_time(spread.p50) for spread in beside))
        table.add_row("stream ITL p99", *(_time(spread.p99) for spread in beside))
        ratios = [spread.p99 / spread.p50 if spread.p50 else 0.0 for spread in beside]
        table.add_row("p99 / p50", *(f"{ratio:.2f}" if ratio else "–" for ratio in ratios))
    return table


def _number(value: float) -> str:
    return f"{value:,.1f}" if value < 10_000 else f"{value:,.0f}"


def _time(value_ms: float) -> str:
    """A dash if nothing was measured."""
    return _number(value_ms) if value_ms else "–"


def _title(report: BenchReport) -> str:
    workload = report.workload
    shared = workload.shared_prefix
    prefix = f" ({shared.count} {shared.unit} shared)" if shared.count else ""
    return (
        f"{report.model} at {report.url}: {workload.prompt.count} {workload.prompt.unit} in{prefix}, "
        f"{workload.output_tokens} out, {workload.endpoint}, {_arrivals(workload)}seed {workload.seed}\n"
    )


def _arrivals(workload: Workload) -> str:
    found = workload.arrivals
    if found is None:
        return ""
    shape = f" with burstiness {found.burstiness:g}" if found.burstiness != 1 else ""
    most = f", at most {found.max_concurrency} open" if found.max_concurrency else ""
    return f"{found.request_rate:g} requests/s{shape}{most}, "


def _notes(report: BenchReport) -> str:
    lines = ["Times in milliseconds."]
    if any(level.tokens_are_chunks for level in report.levels):
        lines.append("The server reports no usage: each chunk counts as one token, prompts count as none.")
    if any(level.num_requests == 0 for level in report.levels):
        lines.append("A level completed no request in its time: use a longer --duration.")
    requested = report.workload.output_tokens * max(1, report.workload.beam_width)
    if report.workload.ignore_eos and any(0 < level.completion_tokens < 0.99 * requested for level in report.levels):
        lines.append(
            f"Outputs were shorter than the {requested} requested tokens: the server does not support ignore_eos."
        )
    return "\n".join(lines)
