"""`pipeline trace`, `ps` and `top`."""

import argparse

from pipeline.cli.commands.settings import Commands
from pipeline.cli.server_options import add_server_options


def add_trace(commands: Commands) -> None:
    from pipeline.cli.trace.options import add_options

    parser = commands.add_parser(
        "trace",
        help="record what a running server does, as a Chrome trace",
        description="Record what every stage of a running server does for some seconds, or draw one request that has "
        "just ended. The file opens in https://ui.perfetto.dev and chrome://tracing.",
        allow_abbrev=False,
    )
    add_options(parser)
    parser.set_defaults(run=_trace)


def _trace(args: argparse.Namespace) -> int:
    from pipeline.cli.trace.command import run

    return run(args)


def add_ps(commands: Commands) -> None:
    parser = commands.add_parser(
        "ps",
        help="list running servers and their stages",
        description="List your running servers and their stages.",
        allow_abbrev=False,
    )
    add_server_options(parser)
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=_ps)


def _ps(args: argparse.Namespace) -> int:
    from pipeline.cli.watch.ps import run

    return run(args)


def add_top(commands: Commands) -> None:
    parser = commands.add_parser(
        "top",
        help="watch a running server",
        description="Watch a running server: its stages, queues, sequences, KV blocks and tokens. q or Ctrl-C ends it.",
        allow_abbrev=False,
    )
    add_server_options(parser)
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="seconds between two updates; by default 1"
    )
    parser.add_argument("--once", action="store_true", help="print one interval and exit")
    parser.add_argument("--json", action="store_true", help="as JSON; with --once or into a pipe, one line")
    parser.set_defaults(run=_top)


def _top(args: argparse.Namespace) -> int:
    from pipeline.cli.watch.top import run

    return run(args)
