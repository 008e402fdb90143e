"""The options of `pipeline trace`, in a module of their own so that --help imports nothing heavy."""

import argparse
from pathlib import Path

from pipeline.cli.server_options import add_server_options

MAX_SECONDS = 595.0
"""The longest window of a stage, less the margin of the command."""


def add_options(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--seconds",
        type=float,
        default=5.0,
        help=f"how long to record, by default 5 and at most {MAX_SECONDS:g}; Ctrl-C ends it early",
    )
    which.add_argument(
        "--request", metavar="ID", help="trace a request that has ended: the id of its reply, or a request id from logs"
    )
    parser.add_argument("--out", type=Path, default=Path("trace.json"), metavar="FILE", help="by default trace.json")
    add_server_options(parser)
