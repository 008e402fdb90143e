"""The options that select one of this machine's running servers, in a module of their own so that --help imports
nothing heavy."""

import argparse

from pipeline.cli import option_types as types


def add_server_options(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """Declare --port, --url and --pid, of which one may be given, and --model. Returns the group of the first three."""
    parser.add_argument("--model", metavar="NAME", help="of a server of several models, the one of this name")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--port", type=types.port, metavar="PORT", help="the server at this HTTP port")
    which.add_argument("--url", type=types.http_url, help=f"the server at this address, as {types.DEFAULT_URL}")
    which.add_argument(
        "--pid", "--server", type=int, metavar="PID", help="the server whose supervisor has this process id"
    )
    return which
