"""The dialogue: reads questions and commands, and shows answers."""

import argparse
import asyncio
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from pipeline.cli import option_types as types
from pipeline.cli.chat.connection import AnswerError, ChatAnswer, ChatConnection
from pipeline.cli.chat.conversation import ChatHistory, Turn
from pipeline.cli.chat.reader import LineReader
from pipeline.cli.chat.screen import Screen, described

OK, FAILED = 0, 1

HELP = '''\
/help          show this list
/reset         clear the conversation; also /clear
/retry         ask the last question again
/system TEXT   set the system prompt; /system shows it, /system off removes it
/temperature N set the temperature, 0 to 2; off leaves it to the server
/max-tokens N  set the maximum length of an answer; off removes it
/save FILE     save the conversation, as JSON if the name ends in .json
/quit          end the chat, like Ctrl-D

A line that ends in \\ continues on the next line.
Lines between two """ are one question.
Ctrl-C stops an answer.'''


class Dialogue:
    """Reads questions, requests answers and shows them. `why_gone` returns why the server has ended for good, or None
    if it may come back."""

    def __init__(
        self,
        runner: asyncio.Runner,
        connection: ChatConnection,
        conversation: ChatHistory,
        options: dict[str, Any],
        screen: Screen,
        why_gone: Callable[[], str | None],
    ) -> None:
        self._runner = runner
        self._connection = connection
        self._conversation = conversation
        self._options = options
        self._screen = screen
        self._why_gone = why_gone
        self._code = OK
        self._is_over = False
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/reset": self._reset,
            "/clear": self._reset,
            "/retry": self._retry,
            "/system": self._system,
            "/temperature": lambda rest: self._set("temperature", types.temperature, rest),
            "/max-tokens": lambda rest: self._set("max_tokens", types.positive, rest),
            "/save": self._save,
            "/quit": self._quit,
            "/exit": self._quit,
        }

    def run(self, reader: LineReader) -> int:
        """Run until the end of input. Returns the exit code: 1 if a piped question had no answer."""
        while not self._is_over:
            try:
                question = reader.question()
                if question is None:
                    break
                self._obey(question)
            except KeyboardInterrupt:
                if not self._screen.is_live:
                    raise
                self._screen.text("\n")
                self._screen.remark("Ctrl-D or /quit ends the chat")
        return self._code

    def _obey(self, question: str) -> None:
        """Run a command, or ask the model a question."""
        word, _, rest = question.partition(" ")
        if word in self._commands:
            self._commands[word](rest.strip())
        elif self._screen.is_live and word.startswith("/") and "/" not in word[1:]:
            self._screen.error(f"unknown command: {word}; /help lists them")
        else:
            self._ask(question)

    # -------------------------------------------------------------------------------------------------- an answer

    def _ask(self, question: str) -> None:
        answer = ChatAnswer(perf_counter())
        pieces: list[str] = []
        turns = self._conversation.with_question(question)
        try:
            with self._screen.answering():
                self._runner.run(self._show(turns, answer, pieces))
        except AnswerError as error:
            self._failed(error)
            return
        except KeyboardInterrupt:
            if not self._screen.is_live:
                raise
            self._screen.text("\n")
            self._screen.remark("stopped")
        self._screen.end_line()
        if pieces or answer.finish_reason:
            self._conversation.answered("".join(pieces))
            self._screen.remark(described(answer))
            self._remark_end(answer)

    async def _show(self, turns: list[Turn], answer: ChatAnswer, pieces: list[str]) -> None:
        async for text in self._connection.stream(turns, self._options, answer):
            pieces.append(text)
            self._screen.text(text)

    def _failed(self, error: AnswerError) -> None:
        """Report a failed answer with advice, or end the chat if nothing can be done."""
        reason = self._why_gone() if error.is_gone else None
        self._screen.error(reason or str(error))
        if error.is_gone and (reason or not self._screen.is_live):
            self._code, self._is_over = FAILED, True
        elif not self._screen.is_live:
            self._code = FAILED
        elif error.is_gone:
            self._screen.remark("/retry asks again once the server is back")
        elif error.code == "context_length_exceeded" or "context" in str(error):
            less = ", or set a smaller /max-tokens" if "max_tokens" in self._options else ""
            self._screen.remark(f"the conversation is too long for the model: /reset, then /retry asks again{less}")
        else:
            self._screen.remark("/retry asks again")

    def _remark_end(self, answer: ChatAnswer) -> None:
        limit = self._options.get("max_tokens")
        if answer.finish_reason == "length":
            is_limit = limit is not None and (answer.num_tokens is None or answer.num_tokens >= limit)
            self._screen.remark(
                f"the answer was cut at {limit} tokens (/max-tokens)"
                if is_limit
                else "the answer was cut: the model's context is full; /reset starts a new conversation"
            )
        elif answer.finish_reason == "abort":
            self._screen.remark("the server ended the answer")

    # --------------------------------------------------------------------------------------------------- commands

    def _help(self, rest: str) -> None:
        self._screen.remark(HELP)

    def _reset(self, rest: str) -> None:
        question = self._conversation.last_question
        self._conversation.reset()
        self._conversation.last_question = question
        self._screen.remark("conversation cleared")

    def _retry(self, rest: str) -> None:
        question = self._conversation.take_back()
        if question is None:
            self._screen.error("/retry: there is no question yet")
        else:
            self._ask(question)

    def _system(self, rest: str) -> None:
        if rest:
            self._conversation.system = None if rest == "off" else rest
        system = self._conversation.system
        self._screen.remark(f"system prompt: {system}" if system else "no system prompt")

    def _set(self, name: str, read: Callable[[str], float], rest: str) -> None:
        """Change an option of the next requests, or show it."""
        command = name.replace("_", "-")
        if rest == "off":
            self._options.pop(name, None)
        elif rest:
            try:
                self._options[name] = read(rest)
            except argparse.ArgumentTypeError as error:
                self._screen.error(f"/{command}: {error}")
                return
        value = self._options.get(name)
        self._screen.remark(f"{command.replace('-', ' ')}: {'not set' if value is None else f'{value:g}'}")

    def _save(self, rest: str) -> None:
        if not rest:
            self._screen.error("/save: needs a file name")
            return
        try:
            self._conversation.save(Path(rest))
        except FileExistsError:
            self._screen.error(f"/save: {rest} exists; use another name")
        except (OSError, RuntimeError, ValueError) as error:  # no such user's home; a name with a zero byte
            self._screen.error(f"/save: {rest} can't be written: {getattr(error, 'strerror', None) or error}")
        else:
            self._screen.remark(f"saved as {rest}")

    def _quit(self, rest: str) -> None:
        self._is_over = True
