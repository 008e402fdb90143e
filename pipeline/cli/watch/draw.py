"""Draws views as rich tables that fit the width. Pure."""

import io
import os
import re
import sys
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.cli.safe_console import SafeConsole
from pipeline.cli.watch.view import View
from pipeline.metrics.stats import StateSlotCounts

NONE = "–"
_LINE_END = re.compile(r" +$", re.MULTILINE)
STATE_STYLES = {"ready": "green", "serving": "green", "late": "red", "dead": "red"} | dict.fromkeys(
    ("starting", "joining", "leaving"), "yellow"
)
PIPE_COLUMNS = 4096
MIN_MODEL_CHARS = 8
MEDIUM, WIDE = 100, 120
"""Widths from which message columns and bars are shown."""
LEFT = ("stage", "state", "holds", "CPU")
DISPENSABLE = ("CPU", "msg/s", "threads", "queue", "busy %", "holds", "memory", "CPU %", "state")
"""The columns of stages that a narrow terminal lacks, the first first. The pid is never cut: it is for `kill`."""


def console() -> Console:
    """For standard output: a terminal cuts lines at its edge, and a pipe has none, unless COLUMNS sets one."""
    columns = os.environ.get("COLUMNS", "")
    is_set = columns.isdecimal() and int(columns) > 0
    if sys.stdout.isatty():
        return SafeConsole(highlight=False)
    return SafeConsole(highlight=False, width=None if is_set else PIPE_COLUMNS, file=_Trimmed())


class _Trimmed(io.StringIO):
    """Standard output without the spaces that tables have at the ends of their lines."""

    def write(self, text: str) -> int:
        sys.stdout.write(_LINE_END.sub("", text))
        return len(text)

    def flush(self) -> None:
        sys.stdout.flush()


def shortened(text: str, room: int) -> str:
    """Cut a text in its middle to at most `room` characters, so that the end of an id or hash stays."""
    if len(text) <= room:
        return text
    num_last = (room - 1) // 2
    return f"{text[: room - 1 - num_last]}…{text[len(text) - num_last :]}"


def server_line(pid: int, model: str, address: str, state: str, uptime_s: float, width: int) -> Text:
    """A server in one line. If that is too long, the address begins a second one, or the time before it; nothing is cut
    but a model name that does not fit there either."""
    begin, end, suffix = f"{pid}  ", f"  up {duration(uptime_s)}", f"  {address}"
    indent = " " * len("pipeline ")
    room = width - len(f"pipeline {begin}  {state}")
    if len(model + end + suffix) > room:
        if len(model + end) > room and len(indent + end + address) <= width:
            end = f"\n{indent}{end.strip()}"
        else:
            suffix = f"\n{indent}{address}"
    if not end.startswith("\n"):
        room -= len(end)
    line = Text.assemble(
        ("pipeline ", "bold"),
        begin,
        (shortened(model or "…", max(room, MIN_MODEL_CHARS)), "bold cyan"),
        "  ",
        (state, STATE_STYLES.get(state, "yellow")),
        end,
        suffix,
    )
    line.no_wrap = True
    line.overflow = "ellipsis"
    return line


KEYS = "q quits, h explains the figures"
HELP = """\
open         requests that clients wait for; open tokens: those of their prompts
depth        most steps that may be in flight at the same time
device busy  share of the time in which the device computes, while it has work
plan wait    share of the time in which the executor waits for a plan
prefix hits  share of prompt tokens that the prefix cache has
preempted    sequences that had to give up their KV blocks for others
drafts right share of the proposed tokens that speculative decoding has accepted
states       slots for recurrent states: of running sequences, and snapshots
forks        sequences that share the KV blocks of their request's prompt
TTFT, ITL    time to first token and between tokens: medians of the last 30 s
busy %       share of the time in which a stage does not wait for messages
↻5           the stage has been restarted five times"""


def top(view: View, width: int, message: str = "", footer: str = "") -> RenderableType:
    """The whole screen of `pipeline top`. `footer`: what keys do, or their help."""
    parts: list[RenderableType] = [
        server_line(view.pid, view.model, view.address, view.state, view.uptime_s, width),
        Text(),
        _counts(view, width),
        _kv(view, width),
        *([_states(view.states)] if view.states is not None else []),
        *([_swap(view)] if view.swap_blocks_total else []),
        Text(),
        _stages(view, width),
    ]
    if message:
        parts.append(Text(message, "red"))
    if footer:
        parts += [Text(), Text(footer, "dim")]
    return Group(*parts)


def _counts(view: View, width: int) -> Table:
    """Four figures in a line, or two if they don't fit."""
    depth = NONE if view.depth is None else str(view.depth)
    device = NONE if view.device_percent is None else f"{view.device_percent:.1f} %"
    accepted = ("", "") if view.accepted_percent is None else ("drafts right", percent(view.accepted_percent))
    lines = [
        ("running", str(view.running), "tokens in/s", number(view.prompt_tokens_per_s),
         "TTFT", milliseconds(view.time_to_first_token_ms), "steps/s", number(view.steps_per_s)),
        ("waiting", str(view.waiting), "tokens out/s", number(view.output_tokens_per_s),
         "ITL", milliseconds(view.inter_token_ms), "tokens/step", number(view.tokens_per_step)),
        ("open", str(view.open_requests), "prefix hits", percent(view.cached_percent),
         "done", str(view.requests_finished), "preempted", str(view.preemptions)),
        ("swapped", str(view.swapped), "open tokens", f"{view.open_tokens:,}",
         "token limit", f"{view.max_open_tokens:,}", "forks", str(view.forks)),
        ("depth", depth, *accepted, "device busy", device, "plan wait", percent(view.plan_wait_percent)),
    ]  # fmt: skip
    whole = _grid(lines)
    return whole if _width(whole) <= width else _grid([line[:4] for line in lines] + [line[4:] for line in lines])


def _grid(lines: Sequence[Sequence[str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for _ in lines[0][::2]:
        table.add_column(style="dim")
        table.add_column(justify="right")
    for line in lines:
        table.add_row(*line)
    return table


def _width(table: Table) -> int:
    """Columns that a table takes if nothing is cut."""
    return Console(width=PIPE_COLUMNS).measure(table).maximum


def stage_table(headings: Sequence[str], rows: Sequence[Sequence[RenderableType]], width: int) -> Table:
    """A table of stages, without as many of the `DISPENSABLE` columns as it takes to fit."""
    shown = list(headings)
    for one in ("", *DISPENSABLE):
        shown = [heading for heading in shown if heading != one]
        table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold")
        for heading in shown:
            table.add_column(heading, justify="left" if heading in LEFT else "right", no_wrap=True)
        for row in rows:
            table.add_row(*(cell for heading, cell in zip(headings, row, strict=True) if heading in shown))
        if _width(table) <= width:
            break
    return table


def _kv(view: View, width: int) -> Text:
    """KV blocks as a bar of held, cached and free blocks."""
    total = view.kv_blocks_total
    if not total:
        return Text("KV  no blocks yet", "dim")
    share = 100 * view.kv_blocks_held / total
    words = f" {share:3.0f} %  {view.kv_blocks_held} held, {view.kv_blocks_cached} cached of {total}"
    room = max(10, min(60, width - len(words) - 6))
    held = -(-room * view.kv_blocks_held // total)
    cached = min(room - held, -(-room * view.kv_blocks_cached // total))
    return Text.assemble(
        ("KV ", "dim"),
        ("█" * held, "green" if held < 0.9 * room else "red"),
        ("▒" * cached, "blue"),
        ("░" * (room - held - cached), "dim"),
        words,
    )


def _states(states: StateSlotCounts) -> Text:
    return Text.assemble(
        ("states ", "dim"),
        f"{states.num_held} slots held, {states.num_cached} cached of {states.num_total}; {states.num_hits:,} hits, "
        f"{states.num_evictions:,} evicted",
    )


def _swap(view: View) -> Text:
    held, total = view.swap_blocks_held, view.swap_blocks_total
    return Text.assemble(
        ("swap ", "dim"),
        f"{held} blocks held of {total}; {view.blocks_swapped_out:,} copied out, {view.blocks_swapped_in:,} back",
    )


def _stages(view: View, width: int) -> Table:
    headings = ["stage", "pid", "state", "CPU %", "busy %", "memory", "queue", "holds"]
    if width >= MEDIUM:
        headings.insert(-1, "msg/s")
    bar = width >= WIDE
    if bar:
        headings.append("CPU")
    rows: list[list[RenderableType]] = []
    for stage in view.stages:
        row: list[RenderableType] = [
            stage.name,
            str(stage.pid),
            Text(stage.state, STATE_STYLES.get(stage.state, "yellow")),
            number(stage.cpu_percent),
            number(stage.busy_percent),
            NONE if stage.rss_bytes is None else size(stage.rss_bytes),
            NONE if stage.num_queued is None else str(stage.num_queued),
            *([number(stage.messages_per_s)] if width >= MEDIUM else []),
            stage.note,
        ]
        if bar:
            row.append(Text("▪" * min(24, round((stage.cpu_percent or 0) / 12.5)), "green"))
        rows.append(row)
    return stage_table(headings, rows, width)


# ------------------------------------------------------------------------------------------------------------ words


def number(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def percent(value: float | None) -> str:
    return NONE if value is None else f"{value:.0f} %"


def milliseconds(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value / 1000:.2f} s" if value >= 1000 else f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"


def size(num_bytes: int) -> str:
    if num_bytes < 1024**2:
        return f"{num_bytes / 1024:.0f} KiB"
    gib = num_bytes / 1024**3
    return f"{gib:.0f} GiB" if gib >= 100 else f"{gib:.2f} GiB" if gib >= 1 else f"{num_bytes / 1024**2:.0f} MiB"


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
