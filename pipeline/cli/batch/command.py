"""`pipeline run-batch`: connects to a server, or starts one, and answers the lines that have no reply."""

import argparse
import asyncio
import secrets
import sys
import time

from pipeline.cli.batch.lines import BatchLine, input_lines
from pipeline.cli.batch.replies import Reply, ReplyFile
from pipeline.cli.batch.runner import BatchRunner
from pipeline.cli.complain import complain
from pipeline.cli.option_types import DEFAULT_URL
from pipeline.cli.own_server import own_settings, started
from pipeline.client.embedded.server import EmbeddedServer
from pipeline.config.load import ConfigError
from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.runtime.security.api_keys import SERVER_VARIABLE, keep_out_of_core_dumps, of_client

FAILED = 1
DRAW_S, LOG_S = 0.5, 30.0
"""Between two lines of progress: in a terminal, where each replaces the one before, and in a log."""


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Answer the file. Returns the exit code. Raises ConfigError for conflicting options."""
    starts = bool(args.config or args.set or getattr(args, "model", None))
    if args.url and starts:
        raise ConfigError(["--url: a model and settings are for a server that this command starts"])
    own: EmbeddedServer | None = None
    try:
        lines = input_lines(args.input_file)
        with ReplyFile(args.output_file, {line.custom_id for line in lines}, overwrite=args.overwrite) as replies:
            left = [line for line in lines if line.custom_id not in replies.done]
            if left:
                key = of_client(args.api_key)
                url = args.url or DEFAULT_URL
                if starts:
                    key = secrets.token_urlsafe()  # other users of this machine may find its port
                    own = EmbeddedServer(own_settings(settings), environ={SERVER_VARIABLE: key})
                    url = started(own)
                if key:
                    keep_out_of_core_dumps()
                _answer(args, url, key, left, replies)
            return _end(replies, len(lines))
    except (UserError, OSError) as error:
        complain("pipeline run-batch", error)
        return FAILED
    finally:
        if own is not None:
            own.close()


def _answer(args: argparse.Namespace, url: str, key: str | None, left: list[BatchLine], replies: ReplyFile) -> None:
    progress = Progress(len(left) + len(replies.done), len(replies.done))

    def write(reply: Reply) -> None:
        replies.write(reply)
        progress.show(len(replies.done), replies.num_errors)

    try:
        asyncio.run(BatchRunner(url, key, args.max_open, args.timeout, write).run(left))
    finally:
        progress.clear()


def _end(replies: ReplyFile, num: int) -> int:
    words = f"{num:,} {'line has its reply' if num == 1 else 'lines have their replies'} in {replies.path}"
    if not replies.num_errors:
        print(words, file=sys.stderr)
        return 0
    errors = f"{replies.num_errors:,} of them {'is an error' if replies.num_errors == 1 else 'are errors'}"
    print(f"{words}; {errors}", file=sys.stderr)
    return FAILED


class Progress:
    """How far a batch is, on standard error."""

    def __init__(self, num: int, num_before: int) -> None:
        self._num, self._num_before = num, num_before
        self._began_s = self._shown_s = time.monotonic()
        self._is_live = sys.stderr.isatty()

    def show(self, num_done: int, num_errors: int) -> None:
        now_s = time.monotonic()
        if now_s - self._shown_s < (DRAW_S if self._is_live else LOG_S):
            return
        self._shown_s = now_s
        rate = (num_done - self._num_before) / (now_s - self._began_s)
        left_s = (self._num - num_done) / rate if rate else 0.0
        errors = f" · {num_errors:,} errors" if num_errors else ""
        words = f"{num_done:,} of {self._num:,}{errors} · {rate:.1f} a second · {_time_of(left_s)} left"
        print(
            f"\r\x1b[K{words}" if self._is_live else words,
            end="" if self._is_live else "\n",
            file=sys.stderr,
            flush=True,
        )

    def clear(self) -> None:
        if self._is_live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _time_of(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
