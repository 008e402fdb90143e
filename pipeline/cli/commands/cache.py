"""`pipeline cache` and `pipeline models`."""

import argparse

from pipeline.cli import option_types as types
from pipeline.cli.commands.settings import Commands, add_settings, settings_of


def add_cache(commands: Commands) -> None:
    parser = commands.add_parser(
        "cache",
        help="list or remove prepared models and compiled kernels",
        description="List or remove what servers keep on disk: prepared models, unpacked wheels, compiled kernels and "
        "crash reports.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION", title="actions")
    ls = actions.add_parser(
        "ls",
        help="list the cache",
        description="List what the cache holds, with sizes and times of the last use.",
        allow_abbrev=False,
    )
    add_settings(ls)
    ls.add_argument("--json", action="store_true", help="as JSON, with paths and each library")
    ls.set_defaults(run=_ls)

    prune = actions.add_parser(
        "prune",
        help="remove what is old, or all",
        description="Remove what has not been used for a time, or all. What a running server uses is kept. A server "
        "makes what it needs again when it starts.",
        allow_abbrev=False,
    )
    add_settings(prune)
    which = prune.add_mutually_exclusive_group()
    which.add_argument(
        "--older-than", type=types.age, metavar="TIME", help="not used for this long, such as 12h, 30d or 2w"
    )
    which.add_argument("--all", action="store_true", help="everything that no running server uses")
    prune.add_argument("--dry-run", action="store_true", help="only print what would be removed")
    prune.set_defaults(run=_prune)

    rm = actions.add_parser(
        "rm",
        help="remove a model, by name",
        description="Remove prepared models, unpacked wheels and what a killed process left, by name as `pipeline "
        "models` or `pipeline cache ls` shows it. What a running server uses is kept. A server makes what it needs "
        "again when it starts.",
        allow_abbrev=False,
    )
    add_settings(rm)
    rm.add_argument("names", nargs="+", metavar="NAME", help="such as SmolLM2-135M-Instruct; also several")
    rm.add_argument("--dry-run", action="store_true", help="only print what would be removed")
    rm.set_defaults(run=_rm)


def _ls(args: argparse.Namespace) -> int:
    settings = settings_of(args)
    from pipeline.cli.cache.command import run_ls

    return run_ls(args, settings)


def _prune(args: argparse.Namespace) -> int:
    settings = settings_of(args)
    from pipeline.cli.cache.command import run_prune

    return run_prune(args, settings)


def _rm(args: argparse.Namespace) -> int:
    settings = settings_of(args)
    from pipeline.cli.cache.remove import run

    return run(args, settings)


def add_models(commands: Commands) -> None:
    parser = commands.add_parser(
        "models",
        help="list the models that are served, cached and supported",
        description="List the models that your servers on this machine serve, those that are prepared in the cache, "
        "and the architectures that are supported.",
        allow_abbrev=False,
    )
    add_settings(parser)
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--supported", action="store_true", help="list only the supported architectures")
    parser.set_defaults(run=_models)


def _models(args: argparse.Namespace) -> int:
    settings = settings_of(args)
    from pipeline.cli.models import run

    return run(args, settings)
