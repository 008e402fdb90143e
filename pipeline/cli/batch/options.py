"""The options of `pipeline run-batch`."""

import argparse
from pathlib import Path

from pipeline.cli import option_types as types
from pipeline.cli.commands.settings import MODEL, Commands, add_flags, add_model, add_settings, settings_of, take_model

MAX_OPEN = 64


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "run-batch",
        help="answer a file of requests",
        description="Answer a file of requests in the form of OpenAI's Batch API, one JSON object in each line: "
        '{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}. The replies go to '
        "another file, in the order in which they end. A run that was ended goes on where it was: lines that have a "
        "reply are not asked again. The exit code is 1 if a reply is an error.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "-i", "--input-file", type=Path, required=True, metavar="FILE", help="the requests; - is standard input"
    )
    parser.add_argument("-o", "--output-file", type=Path, required=True, metavar="FILE", help="the replies")
    parser.add_argument("--overwrite", action="store_true", help="drop the replies that FILE has")
    by_default = (
        f"by default the one at {types.DEFAULT_URL}, or one that this command starts if a model or settings are given"
    )
    types.add_server(parser, by_default)
    parser.add_argument(
        "--max-open",
        type=types.positive,
        default=MAX_OPEN,
        metavar="N",
        help=f"requests that are open at once; by default {MAX_OPEN}",
    )
    parser.add_argument(
        "--timeout",
        type=types.duration,
        default=600.0,
        metavar="TIME",
        help="longest time that a server may be away or refuse requests because it is full; by default 10m",
    )
    add_model(parser)
    add_settings(parser)
    help_text = MODEL["model"] + ", for a server that this command starts"
    add_flags(parser, {"model": help_text})
    parser.set_defaults(run=_run_batch)


def _run_batch(args: argparse.Namespace) -> int:
    take_model(args)
    settings = settings_of(args)
    from pipeline.cli.batch.command import run

    return run(args, settings)
