"""`pipeline trace`, `ps`, `usage`, `top`, `restart`, `sleep`, `wake`, `reload` and `stop`."""

import argparse

from pipeline.cli import option_types as types
from pipeline.cli.commands.settings import Commands, add_settings
from pipeline.cli.server_options import add_server_options


def add_trace(commands: Commands) -> None:
    from pipeline.cli.trace.options import add_options

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
    from pipeline.cli.trace.command import run

    return run(args)


def add_ps(commands: Commands) -> None:
    parser = commands.add_parser(
        "ps",
        help="list running servers and their stages",
        description="List your running servers and their stages.",
        allow_abbrev=False,
    )
    add_server_options(parser)
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=_ps)


def _ps(args: argparse.Namespace) -> int:
    from pipeline.cli.watch.ps import run

    return run(args)


def add_usage(commands: Commands) -> None:
    parser = commands.add_parser(
        "usage",
        help="show what each API key of a running server has used",
        description="Show what each API key of a running server has used since the server's start: requests, tokens of "
        "prompts (those found in the prefix cache too), generated tokens, and requests that were refused.",
        allow_abbrev=False,
    )
    add_server_options(parser)
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=_usage)


def _usage(args: argparse.Namespace) -> int:
    from pipeline.cli.watch.usage import run

    return run(args)


def add_top(commands: Commands) -> None:
    parser = commands.add_parser(
        "top",
        help="watch a running server",
        description="Watch a running server: its stages, queues, sequences, KV blocks and tokens. q or Ctrl-C ends it.",
        allow_abbrev=False,
    )
    add_server_options(parser)
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="seconds between two updates; by default 1"
    )
    parser.add_argument("--once", action="store_true", help="print one interval and exit")
    parser.add_argument("--json", action="store_true", help="as JSON; with --once or into a pipe, one line")
    parser.set_defaults(run=_top)


def _top(args: argparse.Namespace) -> int:
    from pipeline.cli.watch.top import run

    return run(args)


def add_restart(commands: Commands) -> None:
    parser = commands.add_parser(
        "restart",
        help="replace the processes of a stage of a running server, or all of them by a new version",
        description="Replace the processes of a stage of a running server, one after the other. Open requests go on. "
        "The successor starts first and takes over when it is ready. A gateway ends its open streams first, at most "
        "for supervisor.drain_timeout_s. With --new-version, --new-model or --set, the whole server is replaced by a "
        "new one at the same address: new requests go there when it is ready, and the one before ends when its open "
        "requests have ended.",
        allow_abbrev=False,
    )
    parser.add_argument("stage", metavar="STAGE", nargs="?", help="as ingest, which is all its replicas, or ingest.0")
    whole = parser.add_argument_group("the whole server")
    whole.add_argument("--new-version", action="store_true", help="with the code that is installed now")
    whole.add_argument("--new-model", metavar="MODEL", help="with another model; of several, that of --model")
    whole.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="with another value of a setting; may repeat"
    )
    whole.add_argument(
        "--finish",
        choices=("request", "sentence", "now"),
        default="request",
        help="when open requests end: by themselves (the default), at the end of a sentence, or now; one that ends "
        "early has the finish_reason `length`",
    )
    whole.add_argument(
        "--closing-text", default="", metavar="TEXT", help="put this behind the text of each reply that ends early"
    )
    whole.add_argument(
        "--drain-timeout",
        type=types.duration,
        default=0.0,
        metavar="TIME",
        help="how long open requests may go on; by default as long as they need",
    )
    whole.add_argument(
        "--stop-first",
        action="store_true",
        help="end the server before the next one starts, if there is no room for both; new connections wait",
    )
    add_server_options(parser)
    parser.add_argument(
        "--timeout",
        type=types.duration,
        default=600.0,
        metavar="TIME",
        help="for each process, or for the next server to be ready; by default %(default)gs",
    )
    parser.set_defaults(run=_restart)


def _restart(args: argparse.Namespace) -> int:
    if args.new_version or args.new_model is not None or args.set:
        from pipeline.cli.restart.server import run as run_server

        return run_server(args)
    from pipeline.cli.restart.command import run

    return run(args)


def add_sleep(commands: Commands) -> None:
    parser = commands.add_parser(
        "sleep",
        help="end the executor of a running server, and keep its open requests",
        description="End the executor of a running server: its weights and its KV cache leave the memory. Open "
        "requests wait, and go on after `pipeline wake` with exactly what they would have had.",
        allow_abbrev=False,
    )
    add_server_options(parser)
    parser.add_argument("--wake-on-request", action="store_true", help="a new request wakes the server")
    parser.set_defaults(run=_sleep, sleeps=True)


def add_wake(commands: Commands) -> None:
    parser = commands.add_parser(
        "wake",
        help="start the executor of a server again that sleeps",
        description="Start the executor of a server again that sleeps. Open requests go on.",
        allow_abbrev=False,
    )
    add_server_options(parser)
    parser.set_defaults(run=_sleep, sleeps=False, wake_on_request=False)


def _sleep(args: argparse.Namespace) -> int:
    from pipeline.cli.restart.sleep import run

    return run(args)


def add_reload(commands: Commands) -> None:
    parser = commands.add_parser(
        "reload",
        help="change the settings of a running server",
        description="Read the settings of a running server again, from the file and options that it was started with, "
        "and restart the stages that use those that have changed. gateway.replicas, ingest.replicas and "
        "detokenize.replicas add or remove processes instead. API keys and their files are read again and used at "
        "once. Open requests go on. If a setting can't change while the server runs, nothing is changed. --set changes "
        "one setting, also at later reloads; --config names another file, in place of all options.",
        allow_abbrev=False,
    )
    add_settings(parser)
    add_server_options(parser)
    parser.add_argument("--dry-run", action="store_true", help="only show what would happen")
    parser.add_argument(
        "--timeout",
        type=types.duration,
        default=600.0,
        metavar="TIME",
        help="for all restarts; by default %(default)gs",
    )
    parser.set_defaults(run=_reload)


def _reload(args: argparse.Namespace) -> int:
    from pipeline.cli.reload.command import run

    return run(args)


def add_stop(commands: Commands) -> None:
    parser = commands.add_parser(
        "stop",
        help="stop a running server",
        description="Stop a running server, as Ctrl-C in its terminal does: it rejects new requests, lets those in "
        "flight end for at most supervisor.drain_timeout_s, and ends. The command waits until it has ended.",
        allow_abbrev=False,
    )
    which = add_server_options(parser)
    which.add_argument("--all", action="store_true", help="all your servers on this machine")
    parser.add_argument("--now", action="store_true", help="do not wait for requests in flight")
    parser.add_argument(
        "--timeout",
        type=types.duration,
        default=120.0,
        metavar="TIME",
        help="how long to wait; by default %(default)gs",
    )
    parser.set_defaults(run=_stop)


def _stop(args: argparse.Namespace) -> int:
    from pipeline.cli.stop.command import run

    return run(args)
