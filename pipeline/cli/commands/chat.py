"""`pipeline chat`."""

import argparse

from pipeline.cli.commands.settings import (
    CHAT_FLAGS,
    MODEL,
    Commands,
    add_flags,
    add_model,
    add_settings,
    settings_of,
    take_model,
)


def add(commands: Commands) -> None:
    from pipeline.cli.chat.options import add_options

    parser = commands.add_parser(
        "chat",
        help="talk to a model in the terminal",
        description="Talk to a model in the terminal, on a running server or on one that this command starts and "
        "stops. In a pipe each line is a question, and only answers are printed.",
        allow_abbrev=False,
    )
    add_options(parser)
    add_model(parser)
    add_settings(parser)
    help_text = MODEL["model"] + ", for a server that this command starts; with --url, the model's name there"
    add_flags(parser, {"model": help_text, **CHAT_FLAGS})
    parser.set_defaults(run=_chat)


def _chat(args: argparse.Namespace) -> int:
    take_model(args)
    settings = settings_of(args)
    from pipeline.cli.chat.command import run

    return run(args, settings)
