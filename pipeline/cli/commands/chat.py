"""`pipeline chat`."""

import argparse

from pipeline.cli.commands.settings import MODEL, Commands, add_flags, add_settings, settings_of


def add(commands: Commands) -> None:
    from pipeline.cli.chat.options import add_options

    parser = commands.add_parser(
        "chat",
        help="talk to a model in the terminal",
        description="Talk to a model in the terminal: of a server that runs, or of one that this command starts and "
        "ends. Of a pipe each line is a question, and only answers are printed.",
        allow_abbrev=False,
    )
    add_options(parser)
    add_settings(parser)
    add_flags(parser, {"model": MODEL["model"] + ", for a server of its own; with --url, the model's name there"})
    parser.set_defaults(run=_chat)


def _chat(args: argparse.Namespace) -> int:
    settings = settings_of(args)
    from pipeline.cli.chat.command import run

    return run(args, settings)
