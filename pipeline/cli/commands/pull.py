"""`pipeline pull`."""

import argparse

from pipeline.cli.commands.settings import Commands, add_model, add_settings, settings_of, take_model


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "pull",
        help="download a model, or what is new of it",
        description="Download a model into the cache, and check its digests. `pipeline serve` does the same at its "
        "first start, and uses what is in the cache from then on; pull also looks for a newer version on the hub. "
        "A download that was cut off goes on where it ended.",
        allow_abbrev=False,
    )
    add_model(parser, "what `pipeline serve` takes; by default the model of the settings")
    add_settings(parser)
    parser.set_defaults(run=_pull, model=None)


def _pull(args: argparse.Namespace) -> int:
    take_model(args)
    settings = settings_of(args)
    from pipeline.cli.pull import run

    return run(settings)
