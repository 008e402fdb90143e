"""`pipeline usage`: what each API key of a server has used."""

import argparse

import msgspec
from rich.table import Table

from pipeline.cli.complain import complain
from pipeline.cli.server_choice import choose_server
from pipeline.cli.watch import draw
from pipeline.errors import UserError
from pipeline.metrics.stats import KeyUsage, ServerStats
from pipeline.supervisor.admin.admin_client import Admin

MAX_NAME_CHARS = 24
"""So that the table has 80 columns with numbers of nine digits."""


def run(args: argparse.Namespace) -> int:
    """Returns 1 if no server is selected, or it has no keys."""
    try:
        with Admin(choose_server(args)) as server:
            stats = server.stats()
        if not stats.keys:
            raise UserError(f"the server with pid {stats.pid} has no API keys: nothing is counted by key")
    except UserError as error:
        complain("pipeline usage", error)
        return 1
    if args.json:
        print(msgspec.json.encode(plain(stats)).decode())
    else:
        draw.console().print(table(stats.keys))
    return 0


def table(keys: list[KeyUsage]) -> Table:
    """A row for each key, the one with the most tokens first, and their sum."""
    found = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold")
    found.add_column("key", no_wrap=True)
    for name in ("requests", "prompt", "cached", "output", "rejected"):
        found.add_column(name, justify="right", no_wrap=True)
    keys = sorted(keys, key=lambda key: (-key.num_prompt_tokens - key.num_output_tokens, key.name))
    rows = [(key.name, _numbers(key)) for key in keys]
    if len(rows) > 1:
        rows.append(("all", [sum(numbers) for numbers in zip(*(numbers for _, numbers in rows), strict=True)]))
    for name, numbers in rows:
        found.add_row(draw.shortened(name, MAX_NAME_CHARS), *map(str, numbers))
    return found


def _numbers(key: KeyUsage) -> list[int]:
    return [
        *(key.num_requests, key.num_prompt_tokens, key.num_cached_tokens, key.num_output_tokens),
        key.num_rate_limited + key.num_overloaded + key.num_invalid,
    ]


def plain(stats: ServerStats) -> dict[str, object]:
    """JSON for scripts."""
    return {
        "pid": stats.pid,
        "server": stats.server,
        "uptime_s": stats.uptime_s,
        "keys": [
            {
                "name": key.name,
                "requests": key.num_requests,
                "prompt_tokens": key.num_prompt_tokens,
                "cached_tokens": key.num_cached_tokens,
                "output_tokens": key.num_output_tokens,
                "rejected": {
                    "rate_limit": key.num_rate_limited,
                    "overloaded": key.num_overloaded,
                    "invalid": key.num_invalid,
                },
            }
            for key in stats.keys
        ],
    }
