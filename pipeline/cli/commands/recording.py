"""`pipeline record` and `pipeline replay`."""

import argparse

from pipeline.cli.commands.settings import Commands


def add_record(commands: Commands) -> None:
    from pipeline.cli.replay.options import add_record_options

    parser = commands.add_parser(
        "record",
        help="record what a stage of a running server receives",
        description="Record what a stage of a running server receives and sends, including arrays, into a file for "
        "`pipeline replay`. A replay leaves out what belongs to earlier requests; `pipeline serve --record STAGE=FILE` "
        "records from the start.",
        allow_abbrev=False,
    )
    add_record_options(parser)
    parser.set_defaults(run=_record)


def _record(args: argparse.Namespace) -> int:
    from pipeline.cli.replay.command import record

    return record(args)


def add_replay(commands: Commands) -> None:
    from pipeline.cli.replay.options import add_replay_options

    parser = commands.add_parser(
        "replay",
        help="drive one stage from a recording",
        description="Drive one stage from a recording: the same messages in the same turns, the same clock and random "
        "numbers. What it sends is compared with what the recorded stage sent. Exit code 3 where that is not the same.",
        allow_abbrev=False,
    )
    add_replay_options(parser)
    parser.set_defaults(run=_replay)


def _replay(args: argparse.Namespace) -> int:
    from pipeline.cli.replay.command import run_replay

    return run_replay(args)
