"""What has been said in a chat. Pure, but for `save`."""

from pathlib import Path
from typing import Literal

import msgspec

Role = Literal["system", "user", "assistant"]


class Turn(msgspec.Struct, frozen=True):
    """A message, in the shape of the OpenAI API."""

    role: Role
    content: str


class ChatHistory:
    """The turns so far. A question whose answer failed is not among them, and is remembered for another try."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        """What the model is told before everything else."""
        self.last_question: str | None = None
        self._turns: list[Turn] = []
        self._saved: set[Path] = set()

    @property
    def turns(self) -> list[Turn]:
        """All that the model is to read, from the system's prompt on."""
        return ([Turn("system", self.system)] if self.system else []) + self._turns

    def with_question(self, question: str) -> list[Turn]:
        """What the model is to answer. The question joins the conversation with its answer."""
        self.last_question = question
        return [*self.turns, Turn("user", question)]

    def answered(self, answer: str) -> None:
        """The last question has an answer, or as much of one as was wanted."""
        assert self.last_question is not None, "an answer without a question"
        self._turns += [Turn("user", self.last_question), Turn("assistant", answer)]

    def take_back(self) -> str | None:
        """The last question, to be asked again; its answer, where it had one, is forgotten."""
        if self._turns and self._turns[-2].content == self.last_question:
            del self._turns[-2:]
        return self.last_question

    def reset(self) -> None:
        """Forget all but the system's prompt."""
        self._turns.clear()
        self.last_question = None

    def save(self, path: Path) -> None:
        """Write it down: as JSON, the `messages` of the OpenAI API, where the name ends so; else as Markdown.

        Raises FileExistsError where the file was not written by this chat, and OSError.
        """
        path = path.expanduser()
        if path.suffix == ".json":
            text = msgspec.json.format(msgspec.json.encode(self.turns), indent=2).decode() + "\n"
        else:
            text = "\n".join(f"## {turn.role}\n\n{turn.content}\n" for turn in self.turns)
        with path.open("w" if path.resolve() in self._saved else "x", encoding="utf-8") as file:
            file.write(text)
        self._saved.add(path.resolve())
