"""`pipeline config`."""

import argparse
import sys
from pathlib import Path

from pipeline.cli.commands.settings import (
    Commands,
    add_settings,
    print_warning,
    server_settings_of,
    source_of,
)


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "config",
        help="show or check settings",
        description="Show or check settings, or list the presets.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION", title="actions")

    show = actions.add_parser(
        "show",
        help="print all settings as a TOML file",
        description="Print the effective settings as a TOML file with a description of every key; of several models, "
        "each in a table with the keys in which it differs.",
        allow_abbrev=False,
    )
    add_settings(show)
    show.set_defaults(run=_show)

    check = actions.add_parser(
        "check",
        help="check a TOML file",
        description="Check a TOML file and print all problems in it. Exit code 0 or 2.",
        allow_abbrev=False,
    )
    check.add_argument("file", type=Path, metavar="FILE", help="a TOML file, or a preset's name")
    check.set_defaults(run=_check)

    presets = actions.add_parser(
        "presets",
        help="list the presets",
        description="List the settings files that come with this program. --config takes their names.",
        allow_abbrev=False,
    )
    presets.add_argument("--json", action="store_true", help="as JSON, with the settings of each")
    presets.set_defaults(run=_presets)


def _show(args: argparse.Namespace) -> int:
    from pipeline.config.show import server_as_toml

    sys.stdout.write(server_as_toml(server_settings_of(source_of(args), ())))
    return 0


def _check(args: argparse.Namespace) -> int:
    from pipeline.config.models import load_server
    from pipeline.config.rules import remarks

    found = load_server(args.file, warn=print_warning)
    for settings in found.models.values() or (found.shared,):
        for text in remarks(settings):
            print_warning(text)
    print(f"{args.file}: ok")
    return 0


def _presets(args: argparse.Namespace) -> int:
    from pipeline.cli.presets import run

    return run(args)
