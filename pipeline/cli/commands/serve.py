"""`pipeline serve`."""

import argparse
import errno
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pipeline.cli.commands import vllm_flags
from pipeline.cli.commands.settings import (
    MODEL,
    SERVE_FLAGS,
    Commands,
    add_flags,
    add_model,
    add_settings,
    print_warning,
    server_settings_of,
    source_of,
    take_model,
)
from pipeline.config.load import ConfigError
from pipeline.config.models import ServerSettings
from pipeline.config.settings import ExecuteSettings, Settings
from pipeline.errors import UserError

if TYPE_CHECKING:
    from pipeline.supervisor.restart.take_over import TakeOver


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serve a model over HTTP, with the OpenAI API. Ctrl-C lets open streams end, then stops.",
        allow_abbrev=False,
    )
    add_model(parser)
    add_settings(parser)
    add_flags(parser, {key: words for key, words in SERVE_FLAGS.items() if key not in MODEL})
    parser.add_argument(
        "--model",
        action=_Model,
        metavar="MODEL",
        help=f"{MODEL['model']}; given again, with MODEL or NAME=MODEL, each is one of several models",
    )
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
        help="no model: answer every step immediately with generated ids, to measure the other stages",
    )
    looking = parser.add_argument_group("debugging")
    looking.add_argument(
        "--foreground",
        default="",
        metavar="STAGE",
        help="give this stage the terminal, so that breakpoint() in its code works; startup timeouts are disabled",
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
    vllm_flags.add(parser)
    parser.set_defaults(run=_serve, models=None)


class _Model(argparse.Action):
    """Keeps the first model in `model`, and all of them in `models` if there are several."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        models = getattr(namespace, "models", None) or ([] if namespace.model is None else [namespace.model])
        namespace.models, namespace.model = [*models, values], models[0] if models else values


def _serve(args: argparse.Namespace) -> int:
    from pipeline.supervisor.restart.take_over import taken_over

    take_over = taken_over()
    try:
        return _serve_or_take_over(args, take_over)
    except (ConfigError, UserError) as error:
        if take_over is not None:
            take_over.tell(str(error))
        raise


def _serve_or_take_over(args: argparse.Namespace, take_over: "TakeOver | None") -> int:
    """Serve, perhaps in place of a server that gives its sockets."""
    models = args.models if len(args.models or ()) > 1 else []
    take_model(args)
    source = source_of(args)
    if take_over is not None:
        source = take_over.with_options(source)
    server = server_settings_of(source, models)
    settings = server.shared
    share = vllm_flags.gpu_memory_share(args)
    if settings.execute.device == "cpu" and share == ExecuteSettings().gpu_memory_utilization:
        print_warning("--gpu-memory-utilization has no effect on a CPU: execute.kv_cache_bytes sizes the KV cache")
    if args.api_key:
        _take_keys(args.api_key)
    from pipeline.cli.run_options import recordings, stage_name
    from pipeline.supervisor.run_mode import RunMode
    from pipeline.supervisor.serve import serve

    if args.break_at and not args.foreground:
        raise ConfigError(["--break needs --foreground with the stage of the function"])
    if server.models:
        return _serve_models(args, server, take_over)
    if args.inline and args.foreground:
        raise ConfigError(["--inline runs all stages in the foreground: leave out --foreground"])
    run_mode = RunMode(
        record=recordings(args.record, settings),
        instant=args.instant,
        foreground=stage_name(args.foreground, settings, "--foreground") if args.foreground else "",
        break_at=args.break_at,
        inline=args.inline,
        source=source,
        takes_over=take_over is not None,
    )
    return _run(lambda: serve(settings, run_mode, take_over=take_over, is_restartable=True), settings)


def _serve_models(args: argparse.Namespace, server: ServerSettings, take_over: "TakeOver | None") -> int:
    """Serve several models."""
    from pipeline.supervisor.run_mode import RunMode
    from pipeline.supervisor.serve import serve_models

    for option in ("record", "foreground", "inline"):
        if getattr(args, option):
            raise ConfigError([f"--{option} needs a server of one model: leave out --model and [models] of the others"])
    run_mode = RunMode(instant=args.instant, takes_over=take_over is not None)
    return _run(lambda: serve_models(server, run_mode, take_over), server.shared)


def _run(serve: Callable[[], int], settings: Settings) -> int:
    """Run a server in this terminal. Raises ConfigError if its address is not available."""
    from pipeline.cli.run_options import terminal

    try:
        with terminal():
            return serve()
    except BrokenPipeError:
        raise
    except OSError as error:  # the address is not available; the message is for the user
        from pipeline.cli.server_choice import owner_of

        is_taken = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE
        raise ConfigError([f"{error}{owner_of(settings.gateway.port) if is_taken else ''}"]) from error


def _take_keys(keys: list[str]) -> None:
    """Use the keys of `--api-key` like those in the environment, and remove them from the command line that other users
    see. Raises ConfigError."""
    import setproctitle

    from pipeline.runtime.security.api_keys import SERVER_VARIABLE
    from pipeline.runtime.security.key_book import listed

    setproctitle.setproctitle("pipeline serve")
    others = [os.environ[SERVER_VARIABLE]] if SERVER_VARIABLE in os.environ else []
    os.environ[SERVER_VARIABLE] = "\n".join([*others, *listed("\n".join(keys), "--api-key")])
    print_warning(
        "--api-key: other users could see the key in the command line until now, and your shell may remember it: "
        f"gateway.api_keys_file and {SERVER_VARIABLE} keep it secret"
    )
