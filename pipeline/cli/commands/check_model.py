"""`pipeline check-model`."""

import argparse

from pipeline.cli.commands.settings import PROFILE_FLAGS, Commands, add_flags, add_settings, settings_of


def add(commands: Commands) -> None:
    from pipeline.cli.check.options import add_options

    parser = commands.add_parser(
        "check-model",
        help="compare a checkpoint's logits and greedy texts with transformers'",
        description="Compute a checkpoint with this server's programs (whole prompts, chunks, batches, behind a cached "
        "prefix), and compare logits and greedy texts with transformers'. With --set execute.device=cuda a GPU's steps "
        "are compared, in float32 and in bfloat16, beside torch's on a CPU. Exit code 0 where all checks pass, else "
        "1. With --fidelity, measure how close the CPU's kernels are to the same weights in float32; exit code 0 "
        "unless that is impossible.",
        allow_abbrev=False,
    )
    add_settings(parser)
    add_flags(parser, {key: PROFILE_FLAGS[key] for key in ("quantization", "execute.kernels")})
    add_options(parser)
    parser.set_defaults(run=_check_model)


def _check_model(args: argparse.Namespace) -> int:
    settings = settings_of(args)
    from pipeline.cli.check.command import run

    return run(args, settings)
