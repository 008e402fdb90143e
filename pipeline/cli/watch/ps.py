"""`pipeline ps`: this user's servers and their stages."""

import argparse
import sys

import msgspec
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.cli.complain import complain
from pipeline.cli.no_server import START_ONE, no_server
from pipeline.cli.server_choice import is_selected, listed, look, matches
from pipeline.cli.watch import draw
from pipeline.cli.watch.view import note_of, running_of
from pipeline.metrics.stats import ServerStats, StageStats
from pipeline.supervisor.admin.admin_client import find_servers


def run(args: argparse.Namespace) -> int:
    """Returns 1 if a server does not answer, or if none is selected."""
    found, silent = look(find_servers())
    if is_selected(args):
        everything, found, silent = found, [stats for stats in found if matches(stats, args)], []
        if not found:
            running = f"; running are:{listed(everything)}" if everything else ""
            complain("pipeline ps", f"{_missing(args)}{running}")
            return 1
    if args.json:
        print(msgspec.json.encode([plain(stats) for stats in found]).decode())
    else:
        console = draw.console()
        for index, stats in enumerate(found):
            if index:
                console.print()
            line = draw.server_line(stats.pid, stats.model, stats.address, stats.state, stats.uptime_s, console.width)
            console.print(line)
            console.print(_table(stats, console.width))
        if not found and not silent:
            console.print(f"no server is running; {START_ONE}")
    for problem in silent:
        print(f"pipeline ps: {problem}", file=sys.stderr)
    return 1 if silent else 0


def _missing(args: argparse.Namespace) -> str:
    if args.pid is not None:
        return f"no server has pid {args.pid}"
    return no_server(args.url or f"http://127.0.0.1:{args.port}")


def _table(stats: ServerStats, width: int) -> Table:
    headings = ("stage", "pid", "state", "CPU %", "memory", "threads", "queue", "holds")
    rows: list[list[RenderableType]] = [
        [
            stage.name,
            str(stage.pid),
            Text(stage.state, draw.STATE_STYLES.get(stage.state, "yellow")),
            draw.number(_cpu_percent(stage)),
            draw.size(stage.rss_bytes) if stage.has_process else draw.NONE,
            str(stage.num_threads) if stage.has_process else draw.NONE,
            draw.NONE if stage.counts is None else str(stage.counts.num_queued),
            note_of(stage, running_of(stats)),
        ]
        for stage in stats.stages
    ]
    return draw.stage_table(headings, rows, width)


def _cpu_percent(stage: StageStats) -> float | None:
    """Percent of one core since the process started, as in ps(1); None without a process of its own."""
    if not stage.has_process:
        return None
    return 100 * stage.cpu_s / stage.uptime_s if stage.uptime_s > 0 else 0.0


def plain(stats: ServerStats) -> dict[str, object]:
    """JSON for scripts: objects with field names instead of the wire's arrays."""
    return {
        "pid": stats.pid,
        "server": stats.server,
        "version": stats.version,
        "model": stats.model,
        "address": stats.address,
        "state": stats.state,
        "uptime_s": stats.uptime_s,
        "stages": [
            {
                "name": stage.name,
                "pid": stage.pid,
                "node": stage.node or None,
                "state": stage.state,
                "restarts": stage.num_restarts,
                "uptime_s": stage.uptime_s,
                "cpu_s": stage.cpu_s if stage.has_process else None,
                "cpu_percent": _cpu_percent(stage),
                "rss_bytes": stage.rss_bytes if stage.has_process else None,
                "threads": stage.num_threads if stage.has_process else None,
                "queue": None if stage.counts is None else stage.counts.num_queued,
            }
            for stage in stats.stages
        ],
    }
