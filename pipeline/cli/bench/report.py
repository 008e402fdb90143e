"""What was measured, as a table to read and as JSON to keep."""

import msgspec
from rich.console import Console
from rich.table import Table

from pipeline.cli.bench.measure import Summary
from pipeline.cli.bench.options import Workload

HEADINGS = (
    "streams",
    "requests",
    "errors",
    "tokens\nin/out",
    "output\ntok/s",
    "total\ntok/s",
    "prefill\ntok/s",
    "TTFT\np50",
    "\np99",
    "ITL\np50",
    "\np99",
    "TPOT\np50",
    "\np99",
)

LEAST_WIDTH = 130
"""Of a table that goes into a file or a pipe, where there is no terminal to fit."""


class BenchReport(msgspec.Struct, frozen=True):
    """One run of `pipeline bench`."""

    url: str
    model: str
    version: str
    """Of this program."""
    workload: Workload
    levels: list[Summary]


def as_json(report: BenchReport) -> bytes:
    """The report as indented JSON, with a final newline."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def as_table(report: BenchReport) -> Table:
    """One row for each concurrency."""
    table = Table(title=_title(report), title_justify="left", caption=_caption(report), caption_justify="left")
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for level in report.levels:
        table.add_row(
            str(level.concurrency),
            str(level.num_requests),
            f"[red]{level.num_errors}[/red]" if level.num_errors else "0",
            f"{level.prompt_tokens:.0f}/{level.completion_tokens:.0f}",
            f"{level.output_tokens_per_s:,.1f}",
            f"{level.total_tokens_per_s:,.0f}",
            f"{level.prefill_tokens_per_s:,.0f}",
            *(
                f"{value:,.1f}"
                for spread in (level.ttft_ms, level.itl_ms, level.tpot_ms)
                for value in (spread.p50, spread.p99)
            ),
        )
    return table


def console() -> Console:
    """Where the table goes: standard output, wide enough for it where that is no terminal."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=LEAST_WIDTH)


def _title(report: BenchReport) -> str:
    workload = report.workload
    shared = workload.shared_prefix
    prefix = f" ({shared.count} {shared.unit} shared)" if shared.count else ""
    return (
        f"{report.model} at {report.url}: {workload.prompt.count} {workload.prompt.unit} in{prefix}, "
        f"{workload.output_tokens} out, {workload.endpoint}, seed {workload.seed}"
    )


def _caption(report: BenchReport) -> str:
    lines = ["Times in milliseconds."]
    if any(level.tokens_are_chunks for level in report.levels):
        lines.append("The server reports no usage: each chunk counts as one token, and prompts as none.")
    if any(level.num_requests == 0 for level in report.levels):
        lines.append("A level completed no request in its time: use a longer --duration.")
    wanted = report.workload.output_tokens
    if report.workload.ignore_eos and any(0 < level.completion_tokens < 0.99 * wanted for level in report.levels):
        lines.append(
            f"Outputs were shorter than the {wanted} requested tokens: the server does not support ignore_eos."
        )
    return "\n".join(lines)
