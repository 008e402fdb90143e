"""The command line.

In pipeline/cli/commands one function declares a command's options, and one runs it. Commands import what they need when
they run, so that `--help` and usage errors are fast.
"""

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

FAILED, USAGE, INTERRUPTED = 1, 2, 130

try:
    from pipeline.cli.batch import options as batch
    from pipeline.cli.commands import (
        bench,
        cache,
        chat,
        check_model,
        config,
        deploy,
        looking,
        profile,
        pull,
        recording,
        serve,
    )
    from pipeline.cli.commands.other_names import advice_for_command, advice_for_options
    from pipeline.cli.commands.vllm_flags import dashed, hint
    from pipeline.cli.complain import complain
    from pipeline.config.closest import closest
    from pipeline.config.load import ConfigError
    from pipeline.version import VERSION
except KeyboardInterrupt:  # Ctrl-C behind a typing mistake: these take most of the start
    sys.exit(INTERRUPTED)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code: 2 for a usage error, 130 for an interrupt."""
    try:
        parser = _parser()
        if not (sys.argv[1:] if argv is None else argv):
            parser.print_help(sys.stderr)
            return USAGE
        args = parser.parse_args(argv)
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except ConfigError as error:
        for problem in error.problems:
            complain("pipeline", problem)
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        # The reader of our output is gone, or the disk that it goes to is full.
        if error.errno not in (errno.EPIPE, errno.ENOSPC) or error.filename is not None:
            raise
        if error.errno == errno.ENOSPC:
            complain("pipeline", "no space is left for the output")
        # Without this, Python would report the same again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


class _Parser(argparse.ArgumentParser):
    """Reports a usage error in one line, without the usage."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Report unknown options here: the parent parser would name its own help instead of this command's."""
        if self.takes_settings and args is not None:
            args = dashed(args)
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            advice = hint(unknown, args or ()) if self.takes_settings else ""
            advice = advice or (advice_for_options(unknown, self._option_string_actions) if self.takes_settings else "")
            advice = advice or self._closest_options(unknown)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{advice}")
        return found, unknown

    def _closest_options(self, unknown: Sequence[str]) -> str:
        known = [name for action in self._actions for name in action.option_strings if action.help != argparse.SUPPRESS]
        return "".join(closest(word.partition("=")[0], known) for word in unknown if word.startswith("--"))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As argparse, but name the closest choice."""
        if action.choices is not None and value not in action.choices:
            if (advice := advice_for_command(str(value))) and "serve" in action.choices:
                raise argparse.ArgumentError(action, f"invalid choice: {value!r}{advice}")
            choices = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(
                action, f"invalid choice: {value!r}{closest(str(value), choices)} (choose from {', '.join(choices)})"
            )

    @property
    def takes_settings(self) -> bool:
        return any("--set" in action.option_strings for action in self._actions)

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"pipeline: error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    words = "An inference server for large language models."
    parser: argparse.ArgumentParser = _Parser(prog="pipeline", description=words, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"pipeline {VERSION}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    serve.add(commands)
    deploy.add(commands)
    chat.add(commands)
    pull.add(commands)
    batch.add(commands)
    bench.add(commands)
    profile.add(commands)
    recording.add_record(commands)
    recording.add_replay(commands)
    cache.add_models(commands)
    cache.add_cache(commands)
    config.add(commands)
    looking.add_trace(commands)
    looking.add_ps(commands)
    looking.add_usage(commands)
    looking.add_top(commands)
    looking.add_restart(commands)
    looking.add_sleep(commands)
    looking.add_wake(commands)
    looking.add_reload(commands)
    looking.add_stop(commands)
    check_model.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
