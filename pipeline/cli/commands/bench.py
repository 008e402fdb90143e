"""`pipeline bench`."""

import argparse

from pipeline.cli.commands.settings import Commands


def add(commands: Commands) -> None:
    from pipeline.cli.bench.options import add_options

    parser = commands.add_parser(
        "bench",
        help="measure a server's speed",
        description="Measure the speed of any server with the OpenAI API, with a closed loop of streaming clients. The "
        "default run measures 1, 8 and 32 streams, each at temperature 0 and 1, and takes a minute plus warm-up.",
        allow_abbrev=False,
    )
    add_options(parser)
    parser.set_defaults(run=_bench)


def _bench(args: argparse.Namespace) -> int:
    from pipeline.cli.bench.command import run

    return run(args)
