"""`pipeline chat`: connects to a server, or starts one, and runs the dialogue."""

import argparse
import asyncio
import secrets
import sys
from collections.abc import Sequence
from typing import Any

from pipeline.cli.chat.connection import AnswerError, ChatConnection
from pipeline.cli.chat.conversation import ChatHistory
from pipeline.cli.chat.dialogue import FAILED, Dialogue
from pipeline.cli.chat.reader import LineReader
from pipeline.cli.chat.screen import Screen
from pipeline.cli.complain import complain
from pipeline.cli.no_server import host_and_port
from pipeline.cli.option_types import DEFAULT_URL
from pipeline.cli.own_server import own_settings, started
from pipeline.cli.server_choice import look
from pipeline.client.embedded.server import EmbeddedServer
from pipeline.config.load import ConfigError
from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.metrics.stats import ServerStats
from pipeline.runtime.security.api_keys import SERVER_VARIABLE, keep_out_of_core_dumps, of_client
from pipeline.supervisor.admin.admin_client import find_servers

CHAT_OPTIONS = {"temperature": 0.7, "top_p": 0.95}
LAST_WORDS_S = 2.0
"""Longest wait for our own server to end and log the reason."""


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Run the chat. Returns the exit code. Raises ConfigError for conflicting options."""
    if args.url and (args.config or args.set):
        raise ConfigError(["--url: --config and --set are for a server that this command starts"])
    if args.url and getattr(args, "chat_template", None):
        raise ConfigError(["--url: --chat-template is for a server that this command starts; the other has its own"])
    screen = Screen(is_live=sys.stdin.isatty() and sys.stdout.isatty())
    with asyncio.Runner() as runner:
        own: EmbeddedServer | None = None
        connection: ChatConnection | None = None
        try:
            connection, url = _running(args, runner)
            if connection is None:
                if not (args.config or args.set or getattr(args, "model", None)) and (names := find_servers()):
                    screen.remark(also_running(look(names)[0]))
                key = secrets.token_urlsafe()  # other users of this machine may find its port
                own = EmbeddedServer(own_settings(settings), environ={SERVER_VARIABLE: key})
                url = started(own)
                connection = runner.run(_connect(args, url, None, key))
            screen.remark(f"{connection.model} at {url} · /help, Ctrl-D ends")
            dialogue = Dialogue(
                runner, connection, ChatHistory(args.system), _options(args, connection), screen, lambda: _why_gone(own)
            )
            return dialogue.run(LineReader(screen.is_live))
        except (AnswerError, UserError) as error:
            complain("pipeline chat", error)
            return FAILED
        finally:
            if connection is not None:
                runner.run(connection.close())
            if own is not None:
                own.close()


def _running(args: argparse.Namespace, runner: asyncio.Runner) -> tuple[ChatConnection | None, str]:
    """Connect to a running server, if the options allow it. Raises AnswerError if it can't be used."""
    model, template = getattr(args, "model", None), getattr(args, "chat_template", None)
    if args.url:
        return runner.run(_connect(args, args.url, model)), args.url
    if model or template or args.config or args.set:
        return None, ""  # the user wants a server of these
    try:
        return runner.run(_connect(args, DEFAULT_URL, None)), DEFAULT_URL
    except AnswerError as error:
        if error.is_gone:
            return None, ""  # no server listens there
        raise AnswerError(f"{error}; use --url for another server, or --model to start one") from error


async def _connect(args: argparse.Namespace, url: str, model: str | None, key: str | None = None) -> ChatConnection:
    if key := key or of_client(args.api_key):
        keep_out_of_core_dumps()
    connection = ChatConnection(url, model, key, args.timeout)
    try:
        if model is None:
            await connection.find_model()
    except BaseException:
        await connection.close()
        raise
    return connection


def also_running(servers: Sequence[ServerStats]) -> str:
    """The remark before a server of its own starts while others run."""
    addresses = [f"{one.address} (--port {host_and_port(one.address)[1]})" for one in servers if one.address]
    running = f"; running are {', '.join(addresses)}" if addresses else ""
    return f"no server at {DEFAULT_URL}{running}; starting one for this chat"


def _why_gone(own: EmbeddedServer | None) -> str | None:
    """Why our own server has ended; None if it runs, or if it is not ours."""
    if own is None or not own.wait(LAST_WORDS_S):
        return None
    return f"the server has ended: {own.reason()}"


def _options(args: argparse.Namespace, connection: ChatConnection) -> dict[str, Any]:
    """The sampling options of each request. What neither the user nor the model says is as in a chat, not as in the
    API, whose temperature of 1 lets small models ramble. Other servers have defaults of their own."""
    known = connection.recommended
    chats = {} if known is None else {name: value for name, value in CHAT_OPTIONS.items() if name not in known}
    options = {"temperature": args.temperature, "top_p": args.top_p, "max_tokens": args.max_tokens, "seed": args.seed}
    return chats | {name: value for name, value in options.items() if value is not None}
