"""`pipeline profile`."""

import argparse

from pipeline.cli.commands.settings import MODEL, PROFILE_FLAGS, Commands, add_flags, add_settings, settings_of


def add(commands: Commands) -> None:
    from pipeline.cli.profile.options import add_options

    parser = commands.add_parser(
        "profile",
        help="measure what a stage spends its time on",
        description="Measure what a stage spends its time on, alone and without a server.",
        allow_abbrev=False,
    )
    stages = parser.add_subparsers(required=True, metavar="STAGE", title="stages")
    execute = stages.add_parser(
        "execute",
        help="each op of a step, beside what this machine could do at best",
        description="Measure each op of a step, beside what this machine could do at best: the floor of an op is the "
        "time that its bytes take to be read from memory, or its operations to be computed, whichever is longer. A "
        "step's floor `ops in turn` is the sum of them; `overlapped` sets all its bytes against all its operations. "
        "Above 100 % data came from a cache. With --set execute.device=cuda the steps are a GPU's, by its own clock, "
        "with the time of each of their kernels; floors are of what it copies and multiplies a second.",
        allow_abbrev=False,
    )
    add_settings(execute)
    add_flags(execute, PROFILE_FLAGS)
    add_options(execute)
    execute.set_defaults(run=_profile_execute)
    _add_profile_alone(stages)
    _add_profile_chain(stages)


def _profile_execute(args: argparse.Namespace) -> int:
    settings = settings_of(args)
    from pipeline.cli.profile.command import run

    return run(args, settings)


def _add_profile_alone(stages: Commands) -> None:
    from pipeline.cli.profile.alone.options import STAGES, add_alone_options, add_look_options

    for name, its_load in STAGES.items():
        parser = stages.add_parser(
            name,
            help=f"this stage alone: messages and tokens a second, CPU for each; its load is {its_load}",
            description="Run this stage alone, as a process of its own, between fakes of its neighbours at the other "
            f"ends of its real sockets and shared memory, and measure what it can do. Its load is {its_load}.",
            allow_abbrev=False,
        )
        add_settings(parser)
        add_flags(parser, MODEL)
        add_alone_options(parser)
        add_look_options(parser)
        parser.set_defaults(run=_profile_alone, stage=name)


def _add_profile_chain(stages: Commands) -> None:
    from pipeline.cli.profile.alone.options import add_alone_options

    parser = stages.add_parser(
        "pipeline",
        help="all stages with an executor that computes nothing: tokens a second, and what each stage costs a token",
        description="Serve with an executor that computes nothing, stream to clients that read and forget, and measure "
        "how many tokens a second the other stages carry and the CPU time that each of them takes for one. Replicas "
        "are settings: --set gateway.replicas=2 --set detokenize.replicas=2.",
        allow_abbrev=False,
    )
    add_settings(parser)
    add_flags(parser, MODEL)
    add_alone_options(parser)
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="of each stream; by default 128")
    parser.set_defaults(run=_profile_chain)


def _profile_chain(args: argparse.Namespace) -> int:
    settings_of(args)  # a mistake is said before anything is started
    from pipeline.cli.profile.alone.chain import run

    options = [] if args.config is None else ["--config", str(args.config)]
    options += [part for one in args.set for part in ("--set", one)]
    options += ["--model", args.model] if getattr(args, "model", None) is not None else []
    return run(args, options)


def _profile_alone(args: argparse.Namespace) -> int:
    settings = settings_of(args)
    from pipeline.cli.profile.alone.command import run

    return run(args, settings)
