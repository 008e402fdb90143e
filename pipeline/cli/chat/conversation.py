"""The messages of a chat. Pure, except for `save`."""

from pathlib import Path
from typing import Literal

import msgspec

from pipeline.cli.out_file import PRIVATE, write_new, write_output

Role = Literal["system", "user", "assistant"]


class Turn(msgspec.Struct, frozen=True):
    """A message in the shape of the OpenAI API."""

    role: Role
    content: str


class ChatHistory:
    """The messages so far. A question whose answer failed is not among them, but it is kept for /retry."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        """The system prompt."""
        self.last_question: str | None = None
        self._turns: list[Turn] = []
        self._saved: set[Path] = set()

    @property
    def turns(self) -> list[Turn]:
        """All messages for the model, with the system prompt."""
        return ([Turn("system", self.system)] if self.system else []) + self._turns

    def with_question(self, question: str) -> list[Turn]:
        """The messages with a new question. The question joins the history together with its answer."""
        self.last_question = question
        return [*self.turns, Turn("user", question)]

    def answered(self, answer: str) -> None:
        """Add the last question and its answer, which may be partial."""
        assert self.last_question is not None, "an answer without a question"
        self._turns += [Turn("user", self.last_question), Turn("assistant", answer)]

    def take_back(self) -> str | None:
        """Remove the last question and its answer, and return the question for another try."""
        if self._turns and self._turns[-2].content == self.last_question:
            del self._turns[-2:]
        return self.last_question

    def reset(self) -> None:
        """Remove all messages except the system prompt."""
        self._turns.clear()
        self.last_question = None

    def save(self, path: Path) -> None:
        """Write the chat to a file: as JSON (`messages` of the OpenAI API) if the name ends in .json, else as Markdown.
        Raises OSError, and FileExistsError if another program wrote the file."""
        path = path.expanduser()
        if path.suffix == ".json":
            text = msgspec.json.format(msgspec.json.encode(self.turns), indent=2).decode() + "\n"
        else:
            text = "\n".join(f"## {turn.role}\n\n{turn.content}\n" for turn in self.turns)
        if path.resolve() in self._saved:
            write_output(path, text, PRIVATE)
        else:
            write_new(path, text.encode(), PRIVATE)
        self._saved.add(path.resolve())
